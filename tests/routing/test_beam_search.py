from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.network.routing import random_swarm
from swarm.data_structures import Span
from swarm.errors import MissingBlocks
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import RouteRequirements, route_seconds
from swarm.routing.swarm_snapshot import SwarmSnapshot
from tests.infos import server_info
from tests.routing.exact_reference import shortest_path
from tests.routing.swarms import assert_covers, demands, missing_blocks, snapshots, spans


@given(snapshots(), spans(), demands())
@settings(deadline=None, max_examples=500)
def test_equal_to_the_exact_reference_in_small_swarms(snapshot, wanted, demand):
    missing = missing_blocks(snapshot, wanted, demand)
    if missing:
        with pytest.raises(MissingBlocks) as raised:
            find_route(snapshot, wanted, demand)
        assert raised.value.blocks == missing
        return
    route = find_route(snapshot, wanted, demand)
    assert_covers(route, wanted, snapshot, demand)
    exact = route_seconds(snapshot, shortest_path(snapshot, wanted, demand), demand)
    assert math.isclose(route_seconds(snapshot, route, demand), exact, rel_tol=1e-9)


@given(snapshots(), spans(), demands(), st.integers(1, 3))
@settings(deadline=None, max_examples=150)
def test_a_narrow_beam_still_finds_a_whole_route(snapshot, wanted, demand, width):
    if missing_blocks(snapshot, wanted, demand):
        return
    route = find_route(snapshot, wanted, demand, beam_width=width)
    assert_covers(route, wanted, snapshot, demand)
    exact = route_seconds(snapshot, shortest_path(snapshot, wanted, demand), demand)
    assert route_seconds(snapshot, route, demand) >= exact * (1 - 1e-9)


def test_within_one_percent_where_the_beam_is_far_narrower_than_the_swarm():
    for seed in range(3):
        rng = random.Random(seed)
        snapshot = random_swarm(
            rng, servers=400, blocks=16, announced=rng.choice([4, 16]), pinged=rng.choice([32, 400])
        )
        demand = RouteRequirements(cache_tokens=rng.choice([0, 4096]))
        wanted = Span(rng.randrange(3), 16)
        exact = route_seconds(snapshot, find_route(snapshot, wanted, demand, beam_width=len(snapshot)), demand)
        assert exact <= (found := route_seconds(snapshot, find_route(snapshot, wanted, demand), demand)) * (1 + 1e-9)
        assert found <= exact * 1.01


def test_a_server_is_left_in_the_middle_and_used_again():
    slow_inside = server_info(0, 6, "whole", throughput=10.0, round_trips=(("inner", 0.001),))
    inner = server_info(2, 4, "inner", throughput=1e6, round_trips=(("whole", 0.001),))
    snapshot = SwarmSnapshot((slow_inside, inner), {"whole": 0.01, "inner": 0.01})
    assert str(find_route(snapshot, Span(1, 6))) == "route: 1:2 …whole → 2:4 …inner → 4:6 …whole"


def test_a_server_without_room_for_the_session_is_taken_only_if_nobody_else_holds_the_blocks():
    small = server_info(0, 2, "small", throughput=1000.0, cache_tokens_free=10)
    roomy = server_info(0, 2, "roomy", throughput=1.0, cache_tokens_free=100)
    session = RouteRequirements(cache_tokens=50)
    assert find_route(SwarmSnapshot((small, roomy)), Span(0, 2), session).hops[0].server is roomy
    assert find_route(SwarmSnapshot((small, roomy)), Span(0, 2)).hops[0].server is small
    assert find_route(SwarmSnapshot((small,)), Span(0, 2), session).hops[0].server is small


def test_a_replacement_is_chosen_by_its_neighbors_not_by_the_client():
    before = server_info(0, 2, "before", round_trips=(("near-it", 0.002), ("near-client", 0.2)))
    near_it = server_info(2, 4, "near-it", round_trips=(("after", 0.002),))
    near_client = server_info(2, 4, "near-client", round_trips=(("after", 0.2),))
    after = server_info(4, 6, "after")
    snapshot = SwarmSnapshot((before, near_it, near_client, after), {"near-it": 0.1, "near-client": 0.001})
    assert find_route(snapshot, Span(2, 4)).hops[0].server is near_client
    between = RouteRequirements(before="before", after="after")
    assert find_route(snapshot, Span(2, 4), between).hops[0].server is near_it
