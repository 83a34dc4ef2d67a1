"""Which experts should stay in memory."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from swarm.models.flash.stay_priority import DecayedFrequency

BLOCKS, EXPERTS = 2, 4


def use(rule, block: int, experts: list[int], share: float = 1.0, tokens: int = 1) -> None:
    rule.note_use(block, np.array(experts, dtype=np.int64), np.full(len(experts), share), tokens)


def test_what_was_used_last_has_the_highest_priority():
    rule = LeastRecentlyUsed(BLOCKS, EXPERTS)
    for block, expert in ((0, 3), (1, 2), (0, 1), (0, 3)):
        use(rule, block, [expert])
    assert np.argsort(rule.priority_BE.ravel())[-3:].tolist() == [EXPERTS + 2, 1, 3]


def test_a_frequency_becomes_the_share_of_tokens_that_need_an_expert():
    rule = DecayedFrequency(BLOCKS, EXPERTS)
    for token in range(2000):
        use(rule, 0, [0, 1] if token % 2 else [0])
    np.testing.assert_allclose(rule.priority_BE[0, [0, 2]], [1, 0], atol=1e-3)
    assert rule.priority_BE[0, 1] == pytest.approx(0.5, abs=0.05)
    assert not rule.priority_BE[1].any(), "another block"


def test_a_use_counts_half_after_the_half_life():
    rule = DecayedFrequency(BLOCKS, EXPERTS, half_life=10)
    use(rule, 0, [1])
    before = rule.priority_BE[0, 1]
    use(rule, 0, [], tokens=10)
    assert rule.priority_BE[0, 1] == pytest.approx(before / 2)
