"""What windows over neurons read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.neurons.selection_trace import fewest_reads, measured_reads, reads
from swarm.models.flash.sparsity import Sparsity

NEURONS = 8
forwards = st.lists(st.sets(st.integers(0, NEURONS - 1)), min_size=1, max_size=8)


def trace_of(needs: list[set[int]]) -> np.ndarray:
    trace_FN = np.zeros((len(needs), NEURONS), dtype=bool)
    for number, needed in enumerate(needs):
        trace_FN[number, sorted(needed)] = True
    return trace_FN


def fewest_of_all(needs: list[set[int]], slots: int) -> int:
    """The fewest reads of any choice of what stays, found by trying them all."""
    states = {frozenset[int](): 0}
    for needed in needs:
        following: dict[frozenset[int], int] = {}
        for held, count in states.items():
            total = count + len(needed - held)
            candidates = sorted(held | needed)
            for mask in range(1 << len(candidates)):
                kept = frozenset(one for place, one in enumerate(candidates) if mask >> place & 1)
                if len(kept) <= slots and (needed <= kept or len(needed) > slots):
                    following[kept] = min(following.get(kept, total), total)
        states = following
    return min(states.values())


def test_reads_of_each_forward() -> None:
    trace_FN = trace_of([{1, 2}, {2, 3}, {1, 2}, {4, 5, 6}, {1, 2}])
    assert reads(trace_FN, 4).tolist() == [2, 1, 0, 3, 1]
    assert fewest_reads(trace_FN, 4).tolist() == [2, 1, 0, 3, 1]
    assert fewest_reads(trace_FN, 5).tolist() == [2, 1, 0, 3, 0]


@given(forwards, st.integers(1, NEURONS), st.sampled_from([None, 2, 1000]))
def test_no_window_reads_less_than_the_best_possible_or_more_than_everything(
    needs: list[set[int]], slots: int, window: int | None
) -> None:
    trace_FN = trace_of(needs)
    fewest, served = fewest_reads(trace_FN, slots), reads(trace_FN, slots, window)
    if all(len(needed) <= slots for needed in needs):
        assert fewest.sum() <= served.sum()
    assert (served <= trace_FN.sum(1)).all()


@given(st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=6), st.integers(3, 5))
def test_the_best_possible_is_that(needs: list[set[int]], slots: int) -> None:
    assert fewest_reads(trace_of(needs), slots).sum() == fewest_of_all(needs, slots)


def test_what_is_measured_is_a_sparsity_that_says_what_is_read() -> None:
    generator = np.random.default_rng(0)
    chances = np.linspace(0, 0.5, 64)
    selected_RTN = generator.random((5, 60, 64)) < chances
    found = measured_reads(selected_RTN, (1, 4, 8), (0.25, 0.5, 0.75))
    assert sorted(found) == [1, 4]
    sparsity = Sparsity((0.25,), {4: 0.6}, found)
    least = [chances[: round(64 * (1 - share))].sum() / 64 for share in (0.25, 0.5, 0.75)]
    measured = [sparsity.read(share) for share in (0.25, 0.5, 0.75)]
    assert measured == pytest.approx(least, rel=0.35)
    assert all(one >= bound for one, bound in zip(measured, least, strict=True))
    assert sparsity.read(0.5, sessions=4) > sparsity.read(0.5)
