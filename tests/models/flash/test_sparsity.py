"""Shares of records that tokens need together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.models.flash.sparsity import MAX_WINDOW, Sparsity
from tests.models.flash.sparsities import sparsities

MEASURED = Sparsity((0.12,), {2: 0.21, 4: 0.33, 8: 0.47})
"""A trained OPT of 7.5 million parameters."""


def test_gives_back_what_was_measured():
    sparsity = Sparsity((0.1, 0.15, 0.19), {2: 0.18})
    assert [sparsity.needed(count) for count in (1, 2, 3)] == pytest.approx([0.1, 0.15, 0.19])
    assert [MEASURED.needed(1, count) for count in (1, 2, 4, 8)] == pytest.approx([0.12, 0.21, 0.33, 0.47])


def test_sessions_count_as_independent_until_they_were_measured():
    assert Sparsity((0.1,)).needed(1, 3) == pytest.approx(1 - 0.9**3)


def test_the_window_of_the_paper():
    # OPT-6.7B: 24 % of the neurons in memory for a window of 5, and 2.4 % of them new with every token.
    sparsity = Sparsity((0.1, 0.15, 0.188, 0.216, 0.24, 0.264))
    assert sparsity.newly_read(5) == pytest.approx(0.024)
    assert sparsity.newly_read(0) == pytest.approx(0.1)


def test_several_tokens_at_once_read_what_the_window_lacks():
    sparsity = Sparsity((0.1, 0.15, 0.19, 0.22))
    assert sparsity.newly_read(1, tokens=2) == pytest.approx(0.19 - 0.1)


@given(sparsities(), st.integers(0, 80), st.integers(1, 64))
@example(Sparsity((0.5,), {2: 0.5, 3: 0.5, 4: 0.5, 5: 1.0}), 1, 6)
def test_more_tokens_and_more_sessions_never_need_less(sparsity, tokens, sessions):
    needed = sparsity.needed(tokens, sessions)
    assert 0 <= needed <= 1
    assert sparsity.needed(tokens + 1, sessions) >= needed - 1e-9
    assert sparsity.needed(tokens, sessions + 1) >= needed - 1e-9
    assert needed <= 1 - (1 - sparsity.needed(tokens)) ** sessions + 1e-6, "no fewer in common than independent ones"


@given(sparsities(), st.floats(0, 1), st.integers(1, 8))
def test_a_window_fills_its_share(sparsity, share, sessions):
    window = sparsity.window(share, sessions)
    assert sparsity.needed(int(window), sessions) <= share + 1e-9
    assert window == MAX_WINDOW or sparsity.needed(int(window) + 1, sessions) > share - 1e-9


@given(sparsities(), st.floats(0, 80), st.integers(1, 64), st.integers(1, 8))
def test_no_window_reads_more_than_is_needed(sparsity, window, sessions, tokens):
    assert 0 <= sparsity.newly_read(window, sessions, tokens) <= sparsity.needed(tokens, sessions) + 1e-12


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=8))
def test_what_is_read_for_each_token_adds_up_to_what_all_need(steps):
    curve = tuple(itertools.accumulate(sorted(steps, reverse=True)))
    sparsity = Sparsity(curve)
    assert sum(sparsity.newly_read(window) for window in range(12)) == pytest.approx(sparsity.needed(12))


def test_what_is_read_with_some_memory_is_what_was_measured():
    points = {1: ((0.25, 0.08), (0.5, 0.04)), 4: ((0.25, 0.2), (0.5, 0.1))}
    sparsity = Sparsity((0.2,), {4: 0.5}, points)
    assert [sparsity.read(memory) for memory in (0, 0.25, 0.375, 0.5, 0.75, 1)] == pytest.approx(
        [0.2, 0.08, 0.06, 0.04, 0.02, 0]
    )
    assert sparsity.read(0.25, sessions=4) == pytest.approx(0.2)
    assert sparsity.read(0.25, sessions=2) == pytest.approx(0.14)
    assert sparsity.read(0.5, tokens=2) == pytest.approx(0.08)
    assert sparsity.read(0.5, sessions=8) == pytest.approx(0.13), "on through the last two"


def test_more_sessions_than_one_that_was_measured_read_what_their_windows_lack():
    sparsity = Sparsity((0.2, 0.3), reads={1: ((0.5, 0.04),)})
    assert sparsity.read(0.5, sessions=3) == sparsity.newly_read(sparsity.window(0.5, 3), 3) > 0.04


def test_without_measured_reads_the_window_decides():
    sparsity = Sparsity((0.1, 0.15, 0.19, 0.22))
    assert sparsity.read(0.19) == pytest.approx(0.03)
    assert sparsity.read(1.0) == 0


@given(sparsities(), st.floats(0, 1), st.integers(1, 16), st.integers(1, 8))
def test_no_more_is_read_than_is_needed(sparsity, memory, sessions, tokens):
    assert 0 <= sparsity.read(memory, sessions, tokens) <= sparsity.needed(tokens, sessions) + 1e-12


@given(sparsities(), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_never_reads_more(sparsity, one, other):
    if sparsity.reads:
        assert sparsity.read(max(one, other)) <= sparsity.read(min(one, other)) + 1e-12


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ({1: ()}, "lie between"),
        ({1: ((0.5, 1.5),)}, "lie between"),
        ({1: ((1.0, 0.1),)}, "lie between"),
        ({1: ((0.5, 0.1), (0.5, 0.1))}, "never reads more"),
        ({1: ((0.25, 0.1), (0.5, 0.2))}, "never reads more"),
        ({0: ((0.25, 0.1),)}, "positive"),
    ],
)
def test_refuses_reads_that_cannot_be(reads, message):
    with pytest.raises(ValueError, match=message):
        Sparsity((0.3,), reads=reads)


@pytest.mark.parametrize(
    ("tokens", "sessions", "message"),
    [
        ((), {}, "at least"),
        ((0.0,), {}, "between"),
        ((1.5,), {}, "between"),
        ((0.3, 0.2), {}, "never need fewer"),
        ((0.1,), {2: 0.3, 4: 0.2}, "never need fewer"),
        ((0.1,), {0: 0.1}, "positive"),
    ],
)
def test_refuses_shares_that_cannot_be(tokens, sessions, message):
    with pytest.raises(ValueError, match=message):
        Sparsity(tokens, sessions)
