"""Which experts or neurons should stay in memory: rules that learn from use and give each of them a priority.

Pure: no weights, no reading. A rule sees every forward of every block, and keeps a table of priorities; what needs a
slot takes that of the expert or neuron with the lowest one. How near rules come to the best possible cache is measured
by `benchmarks/flash/experts/cache.py` and `benchmarks/flash/quality`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from swarm.models.flash.records import Indices

HALF_LIFE = 64.0
"""Tokens after which a use counts half."""


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


class DecayedFrequency:
    """The share of recent tokens that needed an expert: an exponentially weighted average. The rule that serves.

    Args:
        half_life: tokens after which a use counts half.
    """

    def __init__(self, blocks: int, experts: int, half_life: float = HALF_LIFE) -> None:
        self.priority_BE = np.zeros((blocks, experts))
        self._kept_a_token = 0.5 ** (1 / half_life)

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        kept = self._kept_a_token**tokens
        self.priority_BE[block] *= kept
        self.priority_BE[block, experts] += (1 - kept) * shares
