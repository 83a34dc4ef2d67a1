"""What caches of experts read for a trace."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.experts.routing_trace import fewest_reads, overlap, reads
from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from swarm.models.flash.stay_priority import DecayedFrequency


@st.composite
def traces(draw, tokens=8, blocks=2, experts=4, needed=2) -> np.ndarray:
    length = draw(st.integers(1, tokens))
    one = st.permutations(range(experts)).map(lambda order: order[:needed])
    rows = draw(st.lists(one, min_size=length * blocks, max_size=length * blocks))
    return np.array(rows).reshape(length, blocks, needed)


def fewest_by_trying(trace: np.ndarray, slots: int) -> int:
    """The least number of reads of all ways to choose what leaves."""
    requests = [
        (block, expert) for token in trace.tolist() for block, needed in enumerate(token) for expert in sorted(needed)
    ]

    @cache
    def least(at: int, held: frozenset) -> int:
        if at == len(requests):
            return 0
        if requests[at] in held:
            return least(at + 1, held)
        kept = [held] if len(held) < slots else [held - {leaving} for leaving in held]
        return 1 + min(least(at + 1, one | {requests[at]}) for one in kept)

    return least(0, frozenset())


@given(traces(), st.integers(1, 5))
def test_the_best_possible_cache_is_the_best_of_all_choices(trace, slots):
    assert fewest_reads(trace, slots).sum() == fewest_by_trying(trace, slots)


@given(traces(tokens=20, experts=6), st.integers(2, 12))
def test_no_rule_reads_less_than_the_best_possible_cache(trace, slots):
    best = fewest_reads(trace, slots).sum()
    for rule in (LeastRecentlyUsed(2, 6), DecayedFrequency(2, 6, 4), DecayedFrequency(2, 6)):
        assert best <= reads(trace, slots, rule).sum() <= trace.size


@given(traces(tokens=20, experts=6))
def test_with_room_for_all_each_expert_is_read_once(trace):
    different = sum(len(np.unique(trace[:, block])) for block in range(2))
    assert reads(trace, 12, LeastRecentlyUsed(2, 6)).sum() == different
    assert fewest_reads(trace, 12).sum() == different


def test_a_known_case():
    """One block, two slots, 0 1 2 0 1: whoever leaves for 2, one of the others is read again, and 2 was read too."""
    trace = np.array([0, 1, 2, 0, 1]).reshape(5, 1, 1)
    assert fewest_reads(trace, 2).tolist() == [1, 1, 1, 0, 1]
    assert reads(trace, 2, LeastRecentlyUsed(1, 3)).tolist() == [1, 1, 1, 1, 1]


def test_the_overlap_of_neighboring_tokens():
    trace = np.array([[[0, 1]], [[1, 2]], [[2, 1]]])
    assert overlap(trace) == 0.75
