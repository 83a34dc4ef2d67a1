"""Which sequences of a step leave, and where a span is cut for that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.models.exits.exit_choice import cut_at_exits, sequences_that_leave

numbers = st.lists(st.integers(0, 20), unique=True, max_size=8)


@given(numbers, st.sets(st.integers(0, 20)))
def test_each_row_leaves_by_itself(waiting, sure):
    assert sequences_that_leave("row", waiting, sure) == [one for one in waiting if one in sure]


@given(numbers, st.sets(st.integers(0, 20)))
def test_a_batch_leaves_whole_or_not_at_all(waiting, sure):
    assert sequences_that_leave("all", waiting, sure) == (waiting if sure.issuperset(waiting) else [])


def test_a_batch_leaves_where_its_last_sequence_becomes_sure():
    sure: set[int] = set()
    for block, now in ((2, {0}), (4, {1}), (6, set()), (8, {2, 0})):
        sure |= now
        assert sequences_that_leave("all", [0, 1, 2], sure) == ([0, 1, 2] if block == 8 else [])


@given(st.integers(0, 20), st.integers(1, 20), st.sets(st.integers(0, 45)))
def test_each_exit_inside_has_a_piece_of_one_block_before_it(start, length, exits):
    span = Span(start, start + length)
    pieces = cut_at_exits(span, exits)
    assert [one.start for one in pieces] == [span.start, *(one.end for one in pieces[:-1])]
    assert pieces[-1].end == span.end
    for block in exits:
        if span.start < block <= span.end:
            assert Span(block - 1, block) in pieces
    assert len(pieces) <= 2 * len(exits) + 1
