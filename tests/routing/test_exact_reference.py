from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from swarm.data_structures import Hop, Route, Span
from swarm.errors import MissingBlocks
from swarm.routing.cost_model import RouteRequirements
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.infos import server_info
from tests.routing.exact_reference import shortest_path
from tests.routing.swarms import assert_covers, demands, missing_blocks, plain_seconds, snapshots, spans


def all_routes(snapshot: SwarmSnapshot, demand: RouteRequirements, block: int, end: int) -> list[tuple[Hop, ...]]:
    """Every way to compute blocks [block, end), by trying everything."""
    if block == end:
        return [()]
    return [
        (Hop(one, Span(block, until)), *rest)
        for one in snapshot.servers
        if block in one.span and one.peer_id not in demand.avoid
        for until in range(block + 1, min(one.span.end, end) + 1)
        for rest in all_routes(snapshot, demand, until, end)
    ]


@given(snapshots(max_servers=4), spans(), demands())
@settings(deadline=None, max_examples=500)
def test_no_other_route_takes_less(snapshot, wanted, demand):
    missing = missing_blocks(snapshot, wanted, demand)
    if missing:
        with pytest.raises(MissingBlocks) as raised:
            shortest_path(snapshot, wanted, demand)
        assert raised.value.blocks == missing
        return
    route = shortest_path(snapshot, wanted, demand)
    assert_covers(route, wanted, snapshot, demand)
    least = min(plain_seconds(snapshot, Route(hops), demand) for hops in all_routes(snapshot, demand, *_ends(wanted)))
    assert math.isclose(plain_seconds(snapshot, route, demand), least, rel_tol=1e-9)


def _ends(wanted: Span) -> tuple[int, int]:
    return wanted.start, wanted.end


def test_a_long_way_that_someone_measured_to_be_short_is_taken():
    near = server_info(0, 2, "near", throughput=100.0, round_trips=(("far", 0.001),))
    far = server_info(2, 4, "far", throughput=100.0)
    other = server_info(2, 4, "other", throughput=100.0)
    snapshot = SwarmSnapshot((near, far, other), {"near": 0.02, "far": 0.08, "other": 0.05})
    # By way of far: 0.01 + 0.0005 + 0.04; by way of other: 0.01 + 0.025 + 0.025.
    assert str(shortest_path(snapshot, Span(0, 4))) == "route: 0:2 …near → 2:4 …far"
