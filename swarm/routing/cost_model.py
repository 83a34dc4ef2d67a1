"""Estimates how long one step takes on a route.

A server pushes its output straight to the next one, so a step travels in a circle: half a round trip from the client
to the first server, half a round trip between neighbors, half a round trip back from the last server. At each server
it waits in the queue, is computed, and is sent. Where the way between two neighbors is longer than that over the
client, as between two homes with a relay far away, the client hands the output on.

All numbers are announced by other peers and may be false, so every term is bounded: a cost is never infinite, negative
or NaN. A server that nothing speaks for costs much, but is still better than no route.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.routing.swarm_snapshot import MAX_SECONDS, Flags, Floats, Indices, SwarmSnapshot

FULL_CACHE_PENALTY_S = 100.0
"""Penalty of a server whose free cache is too small for the session. It exceeds the time of any step that a user waits
for but is not infinite: the cache may be free again by the time the session is opened."""

SPARSE_PENALTY = 0.05
"""Share by which the compute time of a server that computes with some neurons only counts as longer. At equal speed an
exact server is used; one that is slower by more than this share is not worth waiting for, for a client that accepts
approximate results."""

RELAYED_PENALTY_S = 0.002
"""Cost of a server that is reached through a relay, beside its round trip, which is that of its way: of two servers
that are as quick, the one that needs no other peer is used."""

VIA_CLIENT_S = 0.01
"""What it costs that a client hands on a server's output, beside the way: its own time, and its line."""

MIN_RATE = 1e-6
"""Lower bound on assumed rates (blocks/s, or tokens/s on a link): keeps 1 / rate far from overflowing."""


@dataclass(frozen=True)
class RouteRequirements:
    """What a route has to carry, where it begins and ends, and which servers it should avoid.

    Attributes:
        tokens: tokens of one step: 1 while generating, more for a prefill or a forward pass.
        cache_tokens: what the session will reserve at every server, sequences x max_length; 0 without a session.
        before: peer id of the server that sends its output to the first hop; None if the client does.
        after: peer id of the server that receives the last hop's output; None if the client does.
        avoid: peer ids that must not be used.
        penalties: peer id -> seconds >= 0 added where that server is used (see `swarm.routing.peer_health`).
        overruns: peer id -> seconds >= 0 added for each block there (see `swarm.routing.peer_health`).
    """

    tokens: int = 1
    cache_tokens: int = 0
    before: str | None = None
    after: str | None = None
    avoid: frozenset[str] = frozenset()
    penalties: Mapping[str, float] = field(default_factory=dict)
    overruns: Mapping[str, float] = field(default_factory=dict)


class CostModel:
    """Costs of all `S` servers of a snapshot for one route. Sources and targets are server numbers.

    Attributes:
        usable: which servers may be used, [S].
        server_seconds: fixed cost of using the server: queue, sending the output, penalties, [S].
        block_seconds: cost of each block that it computes, [S].
        link_seconds: one-way seconds of each announced link, [L]; over the client, where that is shorter.
    """

    def __init__(self, snapshot: SwarmSnapshot, requirements: RouteRequirements) -> None:
        self.snapshot = snapshot
        self.requirements = requirements
        self.usable: Flags = np.ones(len(snapshot), np.bool_)
        self.server_seconds: Floats = _queue_and_wire(snapshot, requirements)
        self.block_seconds: Floats = _block_seconds(snapshot, requirements)
        self._half_client: Floats = np.minimum(snapshot.client_round_trips, MAX_SECONDS) / 2
        self.link_seconds: Floats = np.minimum(snapshot.links.seconds, link_seconds_over_client(snapshot))
        numbers = snapshot.numbers
        for peer_id in requirements.avoid & numbers.keys():
            self.usable[numbers[peer_id]] = False
        for peer_id in requirements.penalties.keys() & numbers.keys():
            self.server_seconds[numbers[peer_id]] += min(requirements.penalties[peer_id], MAX_SECONDS)
        for peer_id in requirements.overruns.keys() & numbers.keys():
            self.block_seconds[numbers[peer_id]] += min(requirements.overruns[peer_id], MAX_SECONDS)

    def holders(self, block: int) -> Indices:
        """Numbers of the usable servers that hold the block, ascending."""
        return np.flatnonzero(self.snapshot.holders(block) & self.usable)

    def travel_seconds(self, sources: Indices, targets: Indices) -> Floats:
        """One-way seconds from each source to each target, [sources, targets]: of the link, or else estimated."""
        seconds = self.estimated_travel_seconds(sources, targets)
        links = self.snapshot.links
        rows = self.positions_in(sources)[links.sources]
        columns = self.positions_in(targets)[links.targets]
        both = (rows >= 0) & (columns >= 0)
        seconds[rows[both], columns[both]] = self.link_seconds[both]
        return seconds

    def estimated_travel_seconds(self, sources: Indices, targets: Indices) -> Floats:
        """Estimated one-way seconds, [sources, targets]; 0 from a server to itself.

        The estimate is the longer of both servers' distances to the client: by the triangle inequality the true
        distance lies between their difference and their sum, and the longer one is the middle.
        """
        seconds: Floats = np.maximum(self._half_client[sources][:, None], self._half_client[targets])
        columns = self.positions_in(targets)[sources]
        same = np.flatnonzero(columns >= 0)
        seconds[same, columns[same]] = 0.0
        return seconds

    def positions_in(self, servers: Indices) -> Indices:
        """Index of each server of the snapshot in `servers`, or -1 if it is not there, [S]."""
        positions = np.full(len(self.snapshot), -1)
        positions[servers] = np.arange(len(servers))
        return positions

    def arrival_seconds(self, targets: Indices) -> Floats:
        """One-way seconds from the start of the route to each target, [targets]."""
        before = self.requirements.before
        if before in self.snapshot.numbers:
            return self.travel_seconds(np.array([self.snapshot.numbers[before]]), targets).reshape(-1)
        return self._to_outside(before, targets)

    def return_seconds(self, sources: Indices) -> Floats:
        """One-way seconds from each source to the end of the route, [sources]."""
        after = self.requirements.after
        if after in self.snapshot.numbers:
            return self.travel_seconds(sources, np.array([self.snapshot.numbers[after]])).reshape(-1)
        return self._to_outside(after, sources)

    def _to_outside(self, peer_id: str | None, servers: Indices) -> Floats:
        """One-way seconds to or from the client, or a server that is not in the snapshot, [servers]."""
        seconds = self._half_client[servers]
        if peer_id is not None:
            seconds = np.maximum(seconds, min(self.snapshot.client_round_trip(peer_id), MAX_SECONDS) / 2)
        return seconds


def link_seconds_over_client(snapshot: SwarmSnapshot) -> Floats:
    """One-way seconds over the client of each announced link, [L]; infinite where it has not measured both servers."""
    ways = np.where(snapshot.measured, np.minimum(snapshot.client_round_trips, MAX_SECONDS) / 2, np.inf)
    seconds: Floats = ways[snapshot.links.sources] + ways[snapshot.links.targets] + VIA_CLIENT_S
    return seconds


def is_nearer_over_client(snapshot: SwarmSnapshot, before: str, after: str) -> bool:
    """Whether a step is sooner at one server if the client hands it on than if another one pushes it there."""
    numbers = snapshot.numbers
    if before not in numbers or after not in numbers or not {before, after} <= snapshot.round_trips.keys():
        return False
    announced = dict(snapshot.servers[numbers[before]].round_trips).get(after)
    if announced is None:
        return False
    over_client = snapshot.client_round_trip(before) + snapshot.client_round_trip(after)
    return min(over_client, MAX_SECONDS) / 2 + VIA_CLIENT_S < min(announced, MAX_SECONDS) / 2


def announced_seconds(hop: Hop, tokens: int) -> float:
    """Seconds of a step of `tokens` tokens at one server, queue included, as it announces them."""
    server = hop.server
    block = 1 / max(server.throughput, MIN_RATE)
    if tokens > 1:
        block = max(block, tokens / max(server.forward_throughput or server.throughput, MIN_RATE))
    wire = tokens / max(server.network_throughput, MIN_RATE) if server.network_throughput > 0 else 0.0
    return min(server.queue_delay, MAX_SECONDS) + wire + hop.span.length * block


def raise_if_blocks_missing(costs: CostModel, span: Span) -> None:
    """Raise `MissingBlocks` with exactly those blocks of the span that no usable server holds."""
    snapshot = costs.snapshot
    # +1 where a server's span begins, -1 after its end: the running sum is the number of holders.
    changes = np.zeros(span.length + 1, np.int64)
    np.add.at(changes, np.clip(snapshot.starts[costs.usable] - span.start, 0, span.length), 1)
    np.add.at(changes, np.clip(snapshot.ends[costs.usable] - span.start, 0, span.length), -1)
    missing = np.flatnonzero(np.cumsum(changes)[:-1] == 0)
    if missing.size:
        raise MissingBlocks(span.start + int(block) for block in missing)


def route_seconds(snapshot: SwarmSnapshot, route: Route, requirements: RouteRequirements) -> float:
    """Expected seconds of one step on a route of the snapshot's servers."""
    costs = CostModel(snapshot, requirements)
    numbers = np.array([snapshot.numbers[hop.server.peer_id] for hop in route.hops])
    seconds = float(costs.arrival_seconds(numbers[:1])[0] + costs.return_seconds(numbers[-1:])[0])
    for number, hop in zip(numbers, route.hops, strict=True):
        seconds += float(costs.server_seconds[number] + hop.span.length * costs.block_seconds[number])
    # A server may be on the route twice.
    unique, positions = np.unique(numbers, return_inverse=True)
    return seconds + float(np.sum(costs.travel_seconds(unique, unique)[positions[:-1], positions[1:]]))


def route_of_servers(snapshot: SwarmSnapshot, span: Span, servers: list[int]) -> Route:
    """The route on which `servers[k]` computes block `span.start + k`; a run of one server is one hop."""
    hops = []
    block = span.start
    for number, group in itertools.groupby(servers):
        end = block + sum(1 for _ in group)
        hops.append(Hop(snapshot.servers[number], Span(block, end)))
        block = end
    return Route(tuple(hops))


def _queue_and_wire(snapshot: SwarmSnapshot, requirements: RouteRequirements) -> Floats:
    network = snapshot.network_throughputs
    wire = np.where(network > 0, requirements.tokens / np.maximum(network, MIN_RATE), 0.0)
    full = snapshot.caches < requirements.cache_tokens
    seconds: Floats = np.minimum(snapshot.queues, MAX_SECONDS) + wire + FULL_CACHE_PENALTY_S * full
    return seconds + RELAYED_PENALTY_S * snapshot.relayed


def _block_seconds(snapshot: SwarmSnapshot, requirements: RouteRequirements) -> Floats:
    seconds: Floats = _compute_seconds(snapshot, requirements) * (1 + SPARSE_PENALTY * snapshot.sparse)
    return seconds


def _compute_seconds(snapshot: SwarmSnapshot, requirements: RouteRequirements) -> Floats:
    one_by_one = snapshot.throughputs
    if requirements.tokens == 1:
        return 1 / np.maximum(one_by_one, MIN_RATE)
    # A server that announces no speed for many tokens at once is assumed to compute them one by one.
    at_once = np.where(snapshot.forward_throughputs > 0, snapshot.forward_throughputs, one_by_one)
    many: Floats = requirements.tokens / np.maximum(at_once, MIN_RATE)
    # Many tokens never take less time than one token.
    slowest: Floats = np.maximum(many, 1 / np.maximum(one_by_one, MIN_RATE))
    return slowest
