from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span, Whereabouts
from swarm.errors import InvalidSpan


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 3), (4, 3), (-1, 2), (-3, -1)])
def test_an_empty_or_reversed_span_cannot_be_made(start, end):
    with pytest.raises(InvalidSpan, match=f"{start}:{end}"):
        Span(start, end)


texts = st.lists(st.text(max_size=8), max_size=4).map(tuple)
hosts = st.sampled_from(["", "81.2.69.142", "8.8.8.8"])


@given(texts, texts, hosts, hosts)
def test_addresses_of_the_local_network_are_for_those_only_who_are_known_to_be_in_it(everywhere, lan, theirs, ours):
    seen = Whereabouts(everywhere, lan, theirs).seen_from(ours)
    assert seen == ((*lan, *everywhere) if ours and ours == theirs else everywhere)
