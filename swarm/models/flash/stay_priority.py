"""Which experts or neurons should stay in memory: rules that learn from use and give each of them a priority.

Pure: no weights, no reading. A rule sees every forward of every block, and keeps a table of priorities; what needs a
slot takes that of the expert or neuron with the lowest one. How near rules come to the best possible cache is measured
by `benchmarks/flash/experts/cache.py` and `benchmarks/flash/quality`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from swarm.models.flash.records import Indices

SLOW_HALF_LIFE, FAST_HALF_LIFE = 64.0, 2.0
"""Tokens after which a use counts half."""

FAST_SHARE = 0.15
"""Weight of the fast average. On the trace of a trained mixture of experts (`benchmarks/flash/experts/cache.py`) the
slow one alone is as good; where routing drifts from token to token, it reads a fifth more than both together."""


class StayPriority(Protocol):
    """A rule.

    Attributes:
        priority_BE: `[blocks, experts or neurons]` float64; what has the lowest number leaves first.
    """

    priority_BE: np.ndarray

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        """Learn from a forward of one block.

        Args:
            experts: those that were needed, or neurons, each once.
            shares: for each of them, the share of the forward's tokens that needed it.
            tokens: of the forward.
        """


class LeastRecentlyUsed:
    """Whatever was not needed for the longest time leaves."""

    def __init__(self, blocks: int, experts: int) -> None:
        self.priority_BE = np.zeros((blocks, experts))
        self._clock = 0

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        self._clock += 1
        self.priority_BE[block, experts] = self._clock


class DecayedFrequency:
    """The share of recent tokens that needed an expert: an exponentially weighted average.

    Args:
        half_life: tokens after which a use counts half.
    """

    def __init__(self, blocks: int, experts: int, half_life: float = SLOW_HALF_LIFE) -> None:
        self.priority_BE = np.zeros((blocks, experts))
        self._kept_a_token = 0.5 ** (1 / half_life)

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        kept = self._kept_a_token**tokens
        self.priority_BE[block] *= kept
        self.priority_BE[block, experts] += (1 - kept) * shares


class TwoSpeedFrequency:
    """Two such averages, one of the last few tokens and one of the text so far, weighted: the rule that serves."""

    def __init__(self, blocks: int, experts: int) -> None:
        self._slow = DecayedFrequency(blocks, experts, SLOW_HALF_LIFE)
        self._fast = DecayedFrequency(blocks, experts, FAST_HALF_LIFE)
        self.priority_BE = np.zeros((blocks, experts))

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        for average in (self._slow, self._fast):
            average.note_use(block, experts, shares, tokens)
        slow_E, fast_E = self._slow.priority_BE[block], self._fast.priority_BE[block]
        self.priority_BE[block] = slow_E + FAST_SHARE * (fast_E - slow_E)
