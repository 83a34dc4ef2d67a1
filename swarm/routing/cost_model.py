"""How long one step takes on a route.

A server pushes its output straight to the next one, so a step travels once around: half a round trip from the client to
the first server, half a round trip between neighbours, half a round trip back from the last server. At each server it
waits in the queue, is computed, and is put on the wire.

Every number comes from others and may be a lie, so every term is bounded: a cost is never infinite, negative or NaN,
and a server that nobody would want costs much but is still better than no route.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.routing.swarm_snapshot import LONGEST, Flags, Floats, Indices, SwarmSnapshot

CACHE_PENALTY = 100.0
"""Seconds for a server whose free cache is too small for the session: more than any step that somebody waits for, but
not infinite. The room may be free again by the time the session is opened."""

SLOWEST = 1e-6
"""Blocks (or tokens on a link) per second below which nobody is taken to be: keeps 1 / rate far from overflowing."""


@dataclass(frozen=True)
class RouteRequirements:
    """What a route is for.

    Attributes:
        tokens: tokens of one step: 1 while generating, more for a prefill or a forward pass.
        cache_tokens: what the session will reserve at every server, rows x max_length; 0 without a session.
        before: peer id of the server that hands over its output to the first hop; None if the client does.
        after: peer id of the server that takes the last hop's output; None if the client does.
        avoid: peer ids not to be used at all.
        penalties: peer id -> seconds >= 0 added where that server is used (see `swarm.routing.peer_health`).
    """

    tokens: int = 1
    cache_tokens: int = 0
    before: str | None = None
    after: str | None = None
    avoid: frozenset[str] = frozenset()
    penalties: Mapping[str, float] = field(default_factory=dict)


class CostModel:
    """Prices of all servers of a snapshot for one demand. `S` servers; sources and targets are server numbers.

    Attributes:
        usable: which servers may be used, [S].
        enter: seconds for using the server at all: queue, putting the output on the wire, penalties, [S].
        block: seconds for each block that it computes, [S].
    """

    def __init__(self, snapshot: SwarmSnapshot, demand: RouteRequirements) -> None:
        self.snapshot = snapshot
        self.demand = demand
        self.usable: Flags = np.ones(len(snapshot), np.bool_)
        self.enter: Floats = _queue_and_wire(snapshot, demand)
        self.block: Floats = _block_seconds(snapshot, demand)
        self._half_client: Floats = np.minimum(snapshot.client_round_trips, LONGEST) / 2
        numbers = snapshot.numbers
        for peer_id in demand.avoid & numbers.keys():
            self.usable[numbers[peer_id]] = False
        for peer_id in demand.penalties.keys() & numbers.keys():
            self.enter[numbers[peer_id]] += min(demand.penalties[peer_id], LONGEST)

    def holders(self, block: int) -> Indices:
        """Numbers of the usable servers that hold the block, ascending."""
        return np.flatnonzero(self.snapshot.holders(block) & self.usable)

    def travel(self, sources: Indices, targets: Indices) -> Floats:
        """One-way seconds from each source to each target, [sources, targets]: announced, or else estimated."""
        seconds = self.estimated_travel(sources, targets)
        links = self.snapshot.links
        rows = self.places(sources)[links.sources]
        columns = self.places(targets)[links.targets]
        both = (rows >= 0) & (columns >= 0)
        seconds[rows[both], columns[both]] = links.seconds[both]
        return seconds

    def estimated_travel(self, sources: Indices, targets: Indices) -> Floats:
        """One-way seconds where nobody announced them, [sources, targets]; 0 from a server to itself.

        The longer one of both servers' round trips to the client: by the triangle inequality the truth lies between
        their difference and their sum, and the longer one is the middle.
        """
        seconds: Floats = np.maximum(self._half_client[sources][:, None], self._half_client[targets])
        columns = self.places(targets)[sources]
        same = np.flatnonzero(columns >= 0)
        seconds[same, columns[same]] = 0.0
        return seconds

    def places(self, servers: Indices) -> Indices:
        """Where each server of the snapshot stands in `servers`, -1 for those that do not, [S]."""
        places = np.full(len(self.snapshot), -1)
        places[servers] = np.arange(len(servers))
        return places

    def arrive(self, targets: Indices) -> Floats:
        """One-way seconds to each target from where the route begins, [targets]."""
        before = self.demand.before
        if before in self.snapshot.numbers:
            return self.travel(np.array([self.snapshot.numbers[before]]), targets).reshape(-1)
        return self._to_outside(before, targets)

    def leave(self, sources: Indices) -> Floats:
        """One-way seconds from each source to where the route ends, [sources]."""
        after = self.demand.after
        if after in self.snapshot.numbers:
            return self.travel(sources, np.array([self.snapshot.numbers[after]])).reshape(-1)
        return self._to_outside(after, sources)

    def _to_outside(self, peer_id: str | None, servers: Indices) -> Floats:
        """To or from the client, or a server that the snapshot does not hold (any more)."""
        seconds = self._half_client[servers]
        if peer_id is not None:
            seconds = np.maximum(seconds, min(self.snapshot.client_round_trip(peer_id), LONGEST) / 2)
        return seconds


def check_held(costs: CostModel, wanted: Span) -> None:
    """Raises `MissingBlocks` with exactly those wanted blocks that no usable server holds."""
    snapshot = costs.snapshot
    # One more wherever a span begins, one less behind its end; the running sum is the number of holders.
    changes = np.zeros(wanted.length + 1, np.int64)
    np.add.at(changes, np.clip(snapshot.starts[costs.usable] - wanted.start, 0, wanted.length), 1)
    np.add.at(changes, np.clip(snapshot.ends[costs.usable] - wanted.start, 0, wanted.length), -1)
    missing = np.flatnonzero(np.cumsum(changes)[:-1] == 0)
    if missing.size:
        raise MissingBlocks(wanted.start + int(block) for block in missing)


def route_seconds(snapshot: SwarmSnapshot, route: Route, demand: RouteRequirements) -> float:
    """Expected seconds of one step on a route of the snapshot's servers."""
    costs = CostModel(snapshot, demand)
    numbers = np.array([snapshot.numbers[hop.server.peer_id] for hop in route.hops])
    seconds = float(costs.arrive(numbers[:1])[0] + costs.leave(numbers[-1:])[0])
    for number, hop in zip(numbers, route.hops, strict=True):
        seconds += float(costs.enter[number] + hop.span.length * costs.block[number])
    # A server may be there twice.
    once, places = np.unique(numbers, return_inverse=True)
    return seconds + float(np.sum(costs.travel(once, once)[places[:-1], places[1:]]))


def as_route(snapshot: SwarmSnapshot, wanted: Span, servers: list[int]) -> Route:
    """The route on which `servers[k]` computes block `wanted.start + k`; a run of one server is one hop."""
    hops = []
    block = wanted.start
    for number, group in itertools.groupby(servers):
        end = block + sum(1 for _ in group)
        hops.append(Hop(snapshot.servers[number], Span(block, end)))
        block = end
    return Route(tuple(hops))


def _queue_and_wire(snapshot: SwarmSnapshot, demand: RouteRequirements) -> Floats:
    network = snapshot.network_throughputs
    wire = np.where(network > 0, demand.tokens / np.maximum(network, SLOWEST), 0.0)
    full = snapshot.caches < demand.cache_tokens
    seconds: Floats = np.minimum(snapshot.queues, LONGEST) + wire + CACHE_PENALTY * full
    return seconds


def _block_seconds(snapshot: SwarmSnapshot, demand: RouteRequirements) -> Floats:
    one_by_one = snapshot.throughputs
    if demand.tokens == 1:
        return 1 / np.maximum(one_by_one, SLOWEST)
    # Who announced no speed for many tokens at once is taken to compute them one by one.
    at_once = np.where(snapshot.forward_throughputs > 0, snapshot.forward_throughputs, one_by_one)
    many: Floats = demand.tokens / np.maximum(at_once, SLOWEST)
    # Many tokens never take less than one.
    return np.maximum(many, 1 / np.maximum(one_by_one, SLOWEST))
