from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Hop, ServerInfo, ServerState, Span
from swarm.errors import MissingBlocks
from swarm.routing.shortest_path import hop_cost, shortest_route

BLOCKS = 5


def server(start: int, end: int, throughput: float = 1.0, peer_id: str = "peer") -> ServerInfo:
    return ServerInfo(
        peer_id=peer_id,
        span=Span(start, end),
        state=ServerState.ONLINE,
        throughput=throughput,
        cache_tokens_free=0,
        revision="main",
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version="1",
    )


@st.composite
def swarms(draw) -> list[ServerInfo]:
    servers = []
    for number in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        servers.append(server(start, end, draw(st.floats(0.01, 1000)), f"peer{number}"))
    return servers


@st.composite
def wanted_spans(draw) -> Span:
    start = draw(st.integers(0, BLOCKS - 1))
    return Span(start, draw(st.integers(start + 1, BLOCKS)))


def all_routes(servers: list[ServerInfo], block: int, end: int) -> list[tuple[Hop, ...]]:
    """Every way to compute blocks [block, end), by trying everything."""
    if block == end:
        return [()]
    return [
        (Hop(one, Span(block, until)), *rest)
        for one in servers
        if block in one.span
        for until in range(block + 1, min(one.span.end, end) + 1)
        for rest in all_routes(servers, until, end)
    ]


def total(hops: tuple[Hop, ...], cost) -> float:
    return sum(cost(hop.server, hop.span.length) for hop in hops)


@given(swarms(), wanted_spans(), st.floats(0, 10))
@settings(deadline=None)
def test_no_other_route_is_cheaper(servers, wanted, round_trip):
    cost = hop_cost(round_trip)
    routes = all_routes(servers, wanted.start, wanted.end)
    if not routes:
        with pytest.raises(MissingBlocks):
            shortest_route(servers, wanted, cost)
        return
    route = shortest_route(servers, wanted, cost)
    assert route.hops in routes
    assert math.isclose(total(route.hops, cost), min(total(hops, cost) for hops in routes), rel_tol=1e-9)


@given(swarms(), wanted_spans(), st.floats(0, 10))
@settings(deadline=None)
def test_each_block_is_computed_once_by_one_who_holds_it(servers, wanted, round_trip):
    try:
        route = shortest_route(servers, wanted, hop_cost(round_trip))
    except MissingBlocks:
        return
    assert [block for hop in route.hops for block in range(hop.span.start, hop.span.end)] == [
        *range(wanted.start, wanted.end)
    ]
    for hop in route.hops:
        assert hop.server in servers
        assert hop.server.span.start <= hop.span.start
        assert hop.span.end <= hop.server.span.end


@given(swarms(), wanted_spans())
@settings(deadline=None)
def test_the_blocks_that_nobody_holds_are_named_exactly(servers, wanted):
    missing = tuple(b for b in range(wanted.start, wanted.end) if all(b not in one.span for one in servers))
    if missing:
        with pytest.raises(MissingBlocks) as caught:
            shortest_route(servers, wanted, hop_cost(0.1))
        assert caught.value.blocks == missing
    else:
        assert shortest_route(servers, wanted, hop_cost(0.1)).hops


def test_an_empty_swarm():
    with pytest.raises(MissingBlocks) as caught:
        shortest_route([], Span(2, 5), hop_cost(0.1))
    assert caught.value.blocks == (2, 3, 4)


def test_what_lies_outside_of_the_request_is_not_missed():
    assert shortest_route([server(1, 3)], Span(1, 3), hop_cost(0.1)).hops == (Hop(server(1, 3), Span(1, 3)),)


def test_one_long_hop_is_better_than_two_faster_ones_when_the_way_is_long():
    slow, left, right = server(0, 4, 10.0, "slow"), server(0, 2, 20.0, "left"), server(2, 4, 20.0, "right")
    servers = [left, right, slow]
    assert shortest_route(servers, Span(0, 4), hop_cost(1.0)).hops == (Hop(slow, Span(0, 4)),)
    near = shortest_route(servers, Span(0, 4), hop_cost(0.01))
    assert near.hops == (Hop(left, Span(0, 2)), Hop(right, Span(2, 4)))


def test_a_server_may_be_left_in_the_middle_of_its_span():
    slow, fast = server(0, 4, 1.0, "slow"), server(1, 4, 100.0, "fast")
    route = shortest_route([slow, fast], Span(0, 4), hop_cost(0.01))
    assert route.hops == (Hop(slow, Span(0, 1)), Hop(fast, Span(1, 4)))


def test_a_server_may_be_entered_in_the_middle_of_its_span_and_used_twice():
    whole, fast = server(0, 4, 1.0, "whole"), server(1, 2, 100.0, "fast")
    route = shortest_route([whole, fast], Span(0, 4), hop_cost(0.01))
    assert route.hops == (Hop(whole, Span(0, 1)), Hop(fast, Span(1, 2)), Hop(whole, Span(2, 4)))


@pytest.mark.parametrize("throughput", [5e-324, 1e-310, 1e9])
def test_an_absurd_throughput_is_a_route_all_the_same(throughput):
    """A server says itself how fast it is; what it says must not break clients."""
    absurd, honest = server(0, 2, throughput, "absurd"), server(1, 2, 1.0, "honest")
    route = shortest_route([absurd, honest], Span(0, 2), hop_cost(0.1))
    assert [block for hop in route.hops for block in range(hop.span.start, hop.span.end)] == [0, 1]


def test_the_cost_of_a_hop():
    cost = hop_cost(0.5)
    assert cost(server(0, 4, 8.0), 2) == 0.5 + 2 / 8.0
