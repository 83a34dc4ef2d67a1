"""The rule that the one which serves is compared with."""

from __future__ import annotations

import numpy as np

from swarm.models.flash.records import Indices


class LeastRecentlyUsed:
    """Whatever was not needed for the longest time leaves, as from a window of the last forwards."""

    def __init__(self, blocks: int, experts: int) -> None:
        self.priority_BE = np.zeros((blocks, experts))
        self._clock = 0

    def note_use(self, block: int, experts: Indices, shares: np.ndarray, tokens: int) -> None:
        self._clock += 1
        self.priority_BE[block, experts] = self._clock
