"""Random swarms for the tests of routing, and the price of a route in plain words."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from hypothesis import strategies as st

from swarm.data_structures import Route, ServerInfo, Span
from swarm.routing.cost_model import (
    FULL_CACHE_PENALTY_S,
    MAX_SECONDS,
    MIN_RATE,
    RELAYED_PENALTY_S,
    VIA_CLIENT_S,
    RouteRequirements,
)
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.infos import server_info

BLOCKS = 6
STRANGER = "stranger"

PLACES = [(start, end) for start in range(BLOCKS) for end in range(start + 1, BLOCKS + 1)]
MOST_SERVERS = 8


def spans() -> st.SearchStrategy[Span]:
    return st.sampled_from([Span(*place) for place in PLACES])


@st.composite
def snapshots(draw: Any, max_servers: int = MOST_SERVERS) -> SwarmSnapshot:
    """Up to `max_servers` servers of `BLOCKS` blocks that announce anything that the schema lets pass.

    Who holds what is drawn, so that a failing swarm shrinks to few servers; the numbers come from a drawn seed, which
    is ten times faster.
    """
    places = draw(st.lists(st.sampled_from(PLACES), max_size=max_servers))
    rng = random.Random(draw(st.integers(0, 2**32)))
    peer_ids = [f"peer{number}" for number in range(len(places))]
    servers = [
        server_info(
            *place,
            peer_id,
            throughput=_rate(rng),
            forward_throughput=rng.choice([0.0, _rate(rng)]),
            network_throughput=rng.choice([0.0, _rate(rng)]),
            queue_delay=_seconds(rng),
            cache_tokens_free=rng.choice([0, 1000, 2**48]),
            round_trips=_some_seconds(rng, [*peer_ids, STRANGER]),
            relayed=rng.random() < 0.3,
        )
        for place, peer_id in zip(places, peer_ids, strict=True)
    ]
    return SwarmSnapshot(tuple(servers), dict(_some_seconds(rng, [*peer_ids, STRANGER])))


@st.composite
def demands(draw: Any) -> RouteRequirements:
    rng = random.Random(draw(st.integers(0, 2**32)))
    peer_ids = [*(f"peer{number}" for number in range(MOST_SERVERS)), STRANGER]
    return RouteRequirements(
        tokens=rng.choice([1, 1, 500]),
        cache_tokens=rng.choice([0, 500]),
        before=rng.choice([None, rng.choice(peer_ids)]),
        after=rng.choice([None, rng.choice(peer_ids)]),
        avoid=frozenset(rng.sample(peer_ids, rng.choice([0, 0, 1, 2]))),
        penalties={peer_id: _seconds(rng) for peer_id in rng.sample(peer_ids, rng.choice([0, 2]))},
    )


def _rate(rng: random.Random) -> float:
    """Over many magnitudes, often around those where travel and computing take about as long, at times absurd."""
    return rng.choice([5e-324, 1e9, 10 ** rng.uniform(-3, 6), rng.uniform(1, 100), rng.uniform(1, 100)])


def _seconds(rng: random.Random) -> float:
    return rng.choice([0.0, 3600.0, rng.uniform(0, 0.3), rng.uniform(0, 0.3), rng.uniform(0, 0.3)])


def _some_seconds(rng: random.Random, peer_ids: list[str]) -> tuple[tuple[str, float], ...]:
    return tuple((peer_id, _seconds(rng)) for peer_id in rng.sample(peer_ids, rng.randint(0, len(peer_ids))))


def plain_seconds(snapshot: SwarmSnapshot, route: Route, demand: RouteRequirements) -> float:
    """What `route_seconds` should be: scalar and step by step."""
    infos = {server.peer_id: server for server in snapshot.servers}
    stops = [demand.before, *(hop.server.peer_id for hop in route.hops), demand.after]
    total = sum(_one_way(snapshot, infos, source, target) for source, target in itertools.pairwise(stops))
    for hop in route.hops:
        total += _stay(hop.server, hop.span.length, demand)
    return total


def _stay(server: ServerInfo, blocks: int, demand: RouteRequirements) -> float:
    alone = 1 / max(server.throughput, MIN_RATE)
    per_block = alone
    if demand.tokens > 1:
        per_block = max(alone, demand.tokens / max(server.forward_throughput or server.throughput, MIN_RATE))
    total = server.queue_delay + blocks * per_block + min(demand.penalties.get(server.peer_id, 0.0), MAX_SECONDS)
    if server.network_throughput:
        total += demand.tokens / max(server.network_throughput, MIN_RATE)
    if server.cache_tokens_free < demand.cache_tokens:
        total += FULL_CACHE_PENALTY_S
    return total + RELAYED_PENALTY_S * server.relayed


def _one_way(snapshot: SwarmSnapshot, infos: dict[str, ServerInfo], source: str | None, target: str | None) -> float:
    if source == target:
        return 0.0
    if source is None or target is None:
        return snapshot.client_round_trip(source or target or "") / 2
    announced = dict(infos[source].round_trips) if source in infos else {}
    if target in announced and target in infos:
        over_client = snapshot.round_trips.get(source, math.inf) + snapshot.round_trips.get(target, math.inf)
        return min(announced[target] / 2, over_client / 2 + VIA_CLIENT_S)
    return max(snapshot.client_round_trip(source), snapshot.client_round_trip(target)) / 2


def assert_covers(route: Route, wanted: Span, snapshot: SwarmSnapshot, demand: RouteRequirements) -> None:
    """Each wanted block is computed exactly once, in order, by a usable server that holds it."""
    assert [block for hop in route.hops for block in range(hop.span.start, hop.span.end)] == list(
        range(wanted.start, wanted.end)
    )
    for hop in route.hops:
        assert hop.server in snapshot.servers
        assert hop.server.span.start <= hop.span.start < hop.span.end <= hop.server.span.end
        assert hop.server.peer_id not in demand.avoid


def missing_blocks(snapshot: SwarmSnapshot, wanted: Span, demand: RouteRequirements) -> tuple[int, ...]:
    """The wanted blocks that nobody usable holds."""
    usable = [server for server in snapshot.servers if server.peer_id not in demand.avoid]
    return tuple(b for b in range(wanted.start, wanted.end) if not any(b in server.span for server in usable))
