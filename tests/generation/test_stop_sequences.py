"""Stop sequences: the same end, however the text is divided into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.generation.stop_sequences import StopSequenceFilter

words = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    watch = StopSequenceFilter(stops)
    shown = "".join([watch.feed(piece) for piece in pieces])
    return shown + ("" if watch.hit else watch.finish()), watch.hit


@given(text=words, stops=stop_lists, cuts=st.lists(st.integers(0, 12), max_size=6))
def test_pieces_do_not_matter(text, stops, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert run(stops, pieces) == run(stops, list(text))


@given(text=words, stops=stop_lists)
def test_the_text_ends_before_the_first_complete_stop(text, stops):
    shown, hit = run(stops, list(text))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert hit == bool(ends)
    if not hit:
        assert shown == text
    else:
        stopped = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert shown == text[: ends[0] - len(stopped)]


def test_held_text_is_shown_once_it_cannot_be_a_stop():
    watch = StopSequenceFilter(["###"])
    assert [watch.feed(piece) for piece in ["one #", "# ", "two##"]] == ["one ", "## ", "two"]
    assert watch.finish() == "##"


@pytest.mark.parametrize("stops", [[], ["x"]])
def test_nothing_is_held_without_a_reason(stops):
    assert StopSequenceFilter(stops).feed("abc") == "abc"


@given(st.text("abE", max_size=8), st.text("abE", max_size=8))
def test_a_preview_is_what_would_be_shown(before, after):
    stops = ["EE", "abb"]
    used = StopSequenceFilter(stops)
    shown = used.feed(before)
    preview = used.preview(after)
    assert used.preview(after) == preview, "it leaves the filter as it is"
    assert used.feed(after) + used.finish() == preview
    assert all(stop not in shown + preview for stop in stops)
