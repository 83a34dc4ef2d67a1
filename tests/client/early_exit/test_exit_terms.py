"""What servers are asked about exits inside their spans."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import EarlyExit
from swarm.client.early_exit.exit_terms import (
    exit_terms,
    span_thresholds,
    terms_for,
    why_no_exits,
    why_none_between,
)
from swarm.data_structures import Hop, Route, Span
from swarm.models.exits.confidence import FLOOR_SHARE
from swarm.protocol.messages import MAX_EXITS, ExitTerms
from tests.infos import server_info

BLOCKS = 12


def server(start: int, end: int, exits: tuple[int, ...] = (), *confidences: str) -> Hop:
    info = server_info(start, end, f"p{start}", exit_blocks=exits, exit_confidences=confidences)
    return Hop(info, info.span)


def project(threshold: object = 0.5, **more: object) -> EarlyExit:
    return EarlyExit(threshold=threshold, fill="project", verify=False, **more)


ROUTE = Route(
    (
        server(0, 4, (2, 4), "softmax", "similarity"),
        server(4, 8),
        server(8, 12, (9, 10, 12), "softmax"),
    )
)


def test_exits_of_all_servers_that_measure_the_confidence():
    assert span_thresholds(project(), ROUTE, BLOCKS) == {2: 0.5, 4: 0.5, 9: 0.5, 10: 0.5}
    assert span_thresholds(project(confidence="similarity"), ROUTE, BLOCKS) == {2: 0.5, 4: 0.5}
    assert span_thresholds(project(confidence="classifier"), ROUTE, BLOCKS) == {}


def test_only_where_the_caller_lets_tokens_leave():
    assert span_thresholds(project(min_block=4, max_block=9), ROUTE, BLOCKS) == {4: 0.5, 9: 0.5}
    assert span_thresholds(project({9: 0.1, 3: 0.2, 2: 0.3}), ROUTE, BLOCKS) == {2: 0.3, 9: 0.1}


def test_a_hop_may_be_a_part_of_a_servers_span():
    whole = server(0, 8, (2, 4, 6, 8), "softmax")
    route = Route((Hop(whole.server, Span(2, 6)), server(6, 12)))
    assert span_thresholds(project(), route, BLOCKS) == {4: 0.5, 6: 0.5}


@given(
    thresholds=st.dictionaries(st.integers(1, 2000), st.floats(0, 1), max_size=2 * MAX_EXITS),
    decay=st.floats(0, 10),
    position=st.integers(0, 100),
)
def test_terms_are_such_as_a_server_accepts(thresholds, decay, position):
    terms = exit_terms(project(0.5, decay=decay, batch="all"), dict(sorted(thresholds.items())), position, 100)
    possible = [block for block, threshold in sorted(thresholds.items()) if threshold < 1]
    if terms is None:
        assert not possible
        return
    assert (terms.confidence, terms.batch) == ("softmax", "all")
    named = dict(terms.thresholds)
    assert list(named) == sorted(named)
    assert len(named) <= MAX_EXITS
    assert set(possible[:MAX_EXITS]) <= set(named) or len(named) == MAX_EXITS
    for block, threshold in named.items():
        assert isinstance(threshold, float)
        assert FLOOR_SHARE * thresholds[block] <= threshold + 1e-9 <= thresholds[block] + 2e-9
    ExitTerms(*(getattr(terms, name) for name in terms.__struct_fields__))


@pytest.mark.parametrize(
    ("options", "route", "why"),
    [
        (project(), Route((server(0, 6), server(6, 12))), "no server of the route has exits"),
        (project(confidence="classifier"), ROUTE, "confidence='classifier', only similarity, softmax"),
        (project(min_block=11), ROUTE, r"leave out all exits of its servers, which are at blocks \[2, 4, 9, 10, 12\]"),
        (project({3: 0.5}), ROUTE, "leave out all exits"),
    ],
)
def test_an_option_without_effect_is_named(options, route, why):
    assert span_thresholds(options, route, BLOCKS) == {}
    warned: list[str] = []
    for position in range(3):
        assert terms_for(options, route, BLOCKS, position, 10, warned.append) is None
    (message,) = set(warned)
    assert message.startswith("early_exit with fill='project': no token can leave inside a server's span")
    assert re.search(why, why_no_exits(options, route))
    assert why_no_exits(options, route) in message


@pytest.mark.parametrize(
    ("options", "route", "why"),
    [
        (EarlyExit(), Route((server(0, 12),)), "one server has all blocks"),
        (EarlyExit(threshold={3: 0.5}), ROUTE, r"leave out all blocks at which its servers begin, which are \[4, 8\]"),
        (EarlyExit(min_block=9), ROUTE, "leave out all blocks"),
        (EarlyExit(max_block=3, verify=False), ROUTE, "leave out all blocks"),
    ],
)
def test_a_route_on_which_nothing_can_leave_between_servers_is_named(options, route, why):
    warned: list[str] = []
    for position in range(3):
        assert terms_for(options, route, BLOCKS, position, 10, warned.append) is None
    (message,) = set(warned)
    assert re.search(why, message)


def test_a_route_on_which_tokens_can_leave_between_servers_is_not_named():
    assert why_none_between(EarlyExit(threshold={8: 0.5}), ROUTE) is None
    assert why_none_between(EarlyExit(threshold=1.0, decay=2.0), ROUTE) is None


def test_nothing_is_asked_unless_the_caller_wants_it():
    for options in (EarlyExit(threshold=0.0), EarlyExit(threshold=0.0, verify=False), project(1.0)):
        assert terms_for(options, ROUTE, BLOCKS, 0, 10, pytest.fail) is None
