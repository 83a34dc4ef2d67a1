"""What caches of experts read for a trace."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.experts.routing_trace import fewest_reads, reads
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
