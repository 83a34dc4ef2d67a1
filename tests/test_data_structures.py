from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Hop, Route, ServerInfo, ServerState, Span, StepLayout, Whereabouts
from swarm.errors import InvalidSpan

SERVER = ServerInfo(
    peer_id="QmVeryLongPeerIdABCDEF",
    span=Span(0, 4),
    state=ServerState.ONLINE,
    throughput=1.0,
    cache_tokens_free=0,
    revision="r",
    digests=(),
    compute_dtype="float32",
    quantization="none",
    version="1",
)


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_span_holds_its_blocks_and_no_others(start, length):
    span = Span(start, start + length)
    assert span.length == length
    assert [block for block in range(-1, start + length + 2) if block in span] == list(range(start, start + length))


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 3), (4, 3), (-1, 2), (-3, -1)])
def test_an_empty_or_reversed_span_cannot_be_made(start, end):
    with pytest.raises(InvalidSpan, match=f"{start}:{end}"):
        Span(start, end)


def test_spans_are_ordered_by_their_first_block():
    assert sorted([Span(2, 3), Span(0, 5), Span(0, 2)]) == [Span(0, 2), Span(0, 5), Span(2, 3)]


def test_a_route_is_told_in_one_line():
    route = Route((Hop(SERVER, Span(0, 2)), Hop(SERVER, Span(2, 4))))
    assert str(route) == "route: 0:2 …ABCDEF → 2:4 …ABCDEF"


def test_layout_counts_packed_tokens():
    layout = StepLayout(starts=(3, 0, 7), counts=(2, 0, 5))
    assert (layout.sequences, layout.tokens, layout.sources) == (3, 7, None)


@pytest.mark.parametrize("value", [Span(0, 1), SERVER, Hop(SERVER, Span(0, 1)), Route(), StepLayout((0,), (1,))])
def test_what_rooms_share_cannot_be_changed(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


texts = st.lists(st.text(max_size=8), max_size=4).map(tuple)
hosts = st.sampled_from(["", "81.2.69.142", "8.8.8.8"])


@given(texts, texts, hosts, hosts)
def test_addresses_of_the_local_network_are_for_those_only_who_are_known_to_be_in_it(everywhere, lan, theirs, ours):
    seen = Whereabouts(everywhere, lan, theirs).seen_from(ours)
    assert seen == ((*lan, *everywhere) if ours and ours == theirs else everywhere)


def test_who_has_announced_nothing_is_nowhere():
    assert Whereabouts().seen_from("") == Whereabouts().seen_from("8.8.8.8") == ()
