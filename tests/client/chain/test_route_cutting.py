"""Cutting a route, and which of its hops are at one server."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.route_cutting import cut_route
from swarm.data_structures import Hop, Route, Span
from tests.infos import server_info


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """A route over some blocks, whose successive hops may be at the same server."""
    edges = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=8)))
    hops = []
    for start, end in pairwise(edges):
        hops.append(Hop(server_info(0, 40, draw(st.sampled_from("abc"))), Span(start, end)))
    return Route(tuple(hops))


BOUNDARIES = st.lists(st.integers(0, 45), max_size=10)


def holders(route: Route) -> list[str]:
    """The server of each block."""
    return [hop.server.peer_id for hop in route.hops for _ in range(hop.span.length)]


@given(route=routes(), boundaries=BOUNDARIES)
def test_a_route_is_cut_where_it_is_wanted_and_nowhere_else(route, boundaries):
    cut = cut_route(route, boundaries)
    assert holders(cut) == holders(route)
    assert all(one.span.end == other.span.start for one, other in pairwise(cut.hops))
    first, last = route.hops[0].span.start, route.hops[-1].span.end
    wanted = {block for block in boundaries if first < block < last}
    assert {hop.span.start for hop in cut.hops} == {hop.span.start for hop in route.hops} | wanted
    assert cut.hops[-1].span.end == last
    assert {id(hop.server) for hop in cut.hops} == {id(hop.server) for hop in route.hops}


@given(route=routes(), boundaries=BOUNDARIES)
def test_a_route_that_is_cut_is_not_cut_again(route, boundaries):
    cut = cut_route(route, boundaries)
    assert cut_route(cut, boundaries) == cut
    assert cut_route(route, ()) == route


@given(route=routes(), boundaries=BOUNDARIES)
def test_cutting_adds_no_servers(route, boundaries):
    names = [server.peer_id for server in cut_route(route, boundaries).servers]
    assert names == [server.peer_id for server in route.servers]
    assert names == [name for name, _ in groupby(hop.server.peer_id for hop in route.hops)]


@given(route=routes())
def test_successive_hops_at_one_server(route):
    runs, place = [], 0
    for _, run in groupby(hop.server.peer_id for hop in route.hops):
        runs.append(range(place, place := place + len(list(run))))
    assert route.runs == tuple(runs)
