from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import InvalidOption, InvalidSpan, UsageError
from swarm.server.config import BlocksWanted


def test_auto():
    assert BlocksWanted.parse("auto") == BlocksWanted(None, None)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
@settings(deadline=None)
def test_a_span_or_a_count(start, length):
    assert BlocksWanted.parse(f"{start}:{start + length}") == BlocksWanted(span=Span(start, start + length))
    assert BlocksWanted.parse(str(length)) == BlocksWanted(count=length)


@pytest.mark.parametrize("text", ["0", "00", "4:4", "5:2", "0:0"])
def test_no_blocks_at_all(text):
    with pytest.raises(InvalidSpan):
        BlocksWanted.parse(text)


@pytest.mark.parametrize(
    "text", ["", ":", "1:", ":4", "1:2:3", "-1", "-1:4", "1.5", "1-4", "0, 4", " 4", "Auto", "all", "²", "٣", "1_0"]
)
def test_what_cannot_be_read(text):
    with pytest.raises(InvalidOption, match="START:END"):
        BlocksWanted.parse(text)


@given(st.text(max_size=12))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text):
    try:
        wanted = BlocksWanted.parse(text)
    except UsageError:
        return
    assert wanted == BlocksWanted() or (wanted.span is None) != (wanted.count is None)
