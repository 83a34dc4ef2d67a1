"""Which blocks stay in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory
from swarm.models.flash.streaming.residency import BUFFERS, choose_resident, needed_bytes

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def taken(sizes: list[int], stay: tuple[bool, ...]) -> int:
    streamed = [size for size, stays in zip(sizes, stay, strict=True) if not stays]
    return sum(sizes) - sum(streamed) + BUFFERS * max(streamed, default=0)


@given(SIZES, st.integers(0, 700))
def test_the_budget_is_kept_and_refused_only_if_nothing_can_be_computed_within_it(sizes, budget):
    if budget < needed_bytes(sizes):
        with pytest.raises(NotEnoughMemory, match="of memory for weights are too little"):
            choose_resident(sizes, budget)
        return
    stay = choose_resident(sizes, budget)
    assert len(stay) == len(sizes)
    assert taken(sizes, stay) <= budget
    assert all(stay) == (sum(sizes) <= budget)


@given(st.integers(1, 40), st.integers(2, 400))
def test_equal_blocks_use_the_whole_budget_and_are_spread_evenly(count, budget):
    stay = choose_resident([10] * count, max(budget, needed_bytes([10] * count)))
    kept = sum(stay)
    if kept == count:
        return
    assert taken([10] * count, stay) + 10 > max(budget, 20), "another block would have fitted"
    if kept:
        places = [place for place, stays in enumerate(stay) if stays]
        gaps = [second - first for first, second in zip(places, [*places[1:], places[0] + count], strict=True)]
        assert max(gaps) - min(gaps) <= 1
