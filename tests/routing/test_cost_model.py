from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Hop, Route, Span
from swarm.routing.beam_search import find_route
from swarm.routing.cost_model import (
    VIA_CLIENT_S,
    CostModel,
    RouteRequirements,
    announced_seconds,
    is_nearer_over_client,
    route_seconds,
)
from swarm.routing.swarm_snapshot import DEFAULT_ROUND_TRIP_S, SwarmSnapshot
from tests.infos import server_info
from tests.routing.swarms import demands, missing_blocks, plain_seconds, snapshots, spans

A = server_info(0, 3, "a", throughput=10.0, queue_delay=0.05, round_trips=(("b", 0.02),))
B = server_info(2, 6, "b", throughput=100.0, forward_throughput=1000.0, network_throughput=500.0)
ROUTE = Route((Hop(A, Span(0, 2)), Hop(B, Span(2, 6))))
SNAPSHOT = SwarmSnapshot((A, B), {"a": 0.04, "b": 0.06})


def price(snapshot: SwarmSnapshot = SNAPSHOT, route: Route = ROUTE, **demand) -> float:
    return round(route_seconds(snapshot, route, RouteRequirements(**demand)), 9)


def test_one_token_once_around():
    travel = 0.02 + 0.01 + 0.03
    a = 0.05 + 2 / 10
    b = 1 / 500 + 4 / 100
    assert price() == round(travel + a + b, 9)


def test_of_equally_fast_servers_the_exact_one_is_used():
    exact = server_info(0, 3, "x", throughput=10.0)
    for tokens in (1, 100):
        for factor, used in ((1.0, "x"), (1.04, "x"), (1.06, "s")):
            sparse = server_info(0, 3, "s", throughput=10.0 * factor, sparse=True)
            for servers in ((exact, sparse), (sparse, exact)):
                route = find_route(SwarmSnapshot(servers), Span(0, 3), RouteRequirements(tokens=tokens))
                assert [hop.server.peer_id for hop in route.hops] == [used]


def test_between_servers_the_client_is_not_visited():
    x = server_info(0, 1, "x", round_trips=(("a", 0.008),))
    snapshot = SwarmSnapshot((A, B, x), {"a": 0.04, "b": 0.06})
    assert price(snapshot, before="x") == round(price() - 0.02 + 0.004, 9)
    # Nobody announced the way from b to x, and the client has not measured x.
    assert price(snapshot, after="x") == round(price() - 0.03 + DEFAULT_ROUND_TRIP_S / 2, 9)


def test_an_unmeasured_link_counts_as_the_longer_way_to_the_client():
    a = server_info(0, 3, "a", throughput=10.0, queue_delay=0.05)
    route = Route((Hop(a, Span(0, 2)), Hop(B, Span(2, 6))))
    assert price(SwarmSnapshot((a, B), {"a": 0.04, "b": 0.06}), route) == round(price() - 0.01 + 0.03, 9)
    assert price(SwarmSnapshot((a, B), {"a": 0.04}), route) == round(
        price() - 0.01 - 0.03 + 2 * DEFAULT_ROUND_TRIP_S / 2, 9
    )


@given(snapshots(), spans(), demands())
@settings(deadline=None, max_examples=200)
def test_costs_are_finite_and_equal_a_plain_calculation(snapshot, wanted, demand):
    if missing_blocks(snapshot, wanted, demand):
        return
    route = find_route(snapshot, wanted, demand)
    found = route_seconds(snapshot, route, demand)
    assert 0 <= found < math.inf
    assert math.isclose(found, plain_seconds(snapshot, route, demand), rel_tol=1e-9, abs_tol=1e-12)


@given(st.integers(1, 10_000), *[st.floats(0.0, 1e4)] * 4)
def test_announced_seconds_equal_the_cost_model(tokens, throughput, forward, network, queue):
    server = server_info(
        2,
        6,
        "x",
        throughput=throughput,
        forward_throughput=forward,
        network_throughput=network,
        queue_delay=queue,
        cache_tokens_free=100,
    )
    costs = CostModel(SwarmSnapshot((server,)), RouteRequirements(tokens))
    expected = costs.server_seconds[0] + 4 * costs.block_seconds[0]
    assert announced_seconds(Hop(server, Span(2, 6)), tokens) == pytest.approx(expected)


def test_overruns_are_added_for_each_block():
    assert price(overruns={"a": 0.5}) == round(price() + 2 * 0.5, 9)
    assert price(overruns={"nobody": 0.5}) == price()


def test_of_equally_quick_servers_the_one_that_needs_no_relay_is_used():
    direct = server_info(0, 3, "direct", throughput=10.0)
    relayed = server_info(0, 3, "relayed", throughput=10.0, relayed=True)
    for servers in ((direct, relayed), (relayed, direct)):
        for direct_s, relayed_s, used in ((0.02, 0.02, "direct"), (0.05, 0.02, "relayed")):
            snapshot = SwarmSnapshot(servers, {"direct": direct_s, "relayed": relayed_s})
            assert [hop.server.peer_id for hop in find_route(snapshot, Span(0, 3)).hops] == [used]


def test_a_step_goes_over_the_client_where_that_is_shorter_than_the_link():
    for between, to_client, over_client in [
        (0.05, 0.04, False),
        (0.3, 0.04, True),
        (0.09, 0.04, False),
        (0.11, 0.04, True),
    ]:
        a = server_info(0, 3, "a", throughput=10.0, round_trips=(("b", between),))
        snapshot = SwarmSnapshot((a, B), {"a": to_client, "b": to_client})
        assert is_nearer_over_client(snapshot, "a", "b") is over_client
        costs = CostModel(snapshot, RouteRequirements())
        assert costs.link_seconds.tolist() == [min(between / 2, to_client + VIA_CLIENT_S)]


def test_where_the_client_has_not_measured_both_servers_the_link_is_used():
    a = server_info(0, 3, "a", round_trips=(("b", 9.0),))
    for measured in ({}, {"a": 0.01}, {"b": 0.01}):
        assert not is_nearer_over_client(SwarmSnapshot((a, B), measured), "a", "b")
    assert not is_nearer_over_client(SwarmSnapshot((a,), {"a": 0.01, "b": 0.01}), "a", "b")
    assert not is_nearer_over_client(SwarmSnapshot((B, a), {"a": 0.01, "b": 0.01}), "b", "a")
