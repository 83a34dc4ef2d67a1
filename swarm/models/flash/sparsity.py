"""How many of a block's neurons (or experts) tokens need, alone and together: what was measured over text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

_NEARLY_ALL = 1 - 1e-9
"""Shares are kept below 1, where their logarithms end."""

MAX_WINDOW = 256
"""Tokens. By then a window holds whatever a text keeps coming back to."""


@dataclass(frozen=True)
class Sparsity:
    """Shares of a block's records that tokens need, as measured.

    Raises `ValueError` if a share is not between 0 and 1, or falls where it can only grow.

    Attributes:
        tokens: `tokens[k - 1]` is the share that k consecutive tokens of one session need together: the aggregated
            usage s_agg(k) of "LLM in a flash", section 3.1. The first is what one token needs.
        sessions: number of sessions to the share that one token of each needs together. Without it, sessions count as
            independent of each other.
        reads: number of sessions to points (share of the records in memory, share that is read for one token of each
            session together), by share in memory: measured by replaying what tokens need. Without it, what is read
            follows from the window that fits into memory, as if what was needed longest ago left.
    """

    tokens: tuple[float, ...]
    sessions: Mapping[int, float] = field(default_factory=dict)
    reads: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("at least the share that one token needs has to be known")
        together = [self.sessions[count] for count in sorted(self.sessions)]
        for shares in (self.tokens, together):
            if not all(0 < share <= 1 for share in shares):
                raise ValueError(f"shares lie between 0 and 1, not {shares}")
            if any(later < earlier for earlier, later in pairwise(shares)):
                raise ValueError(f"more tokens never need fewer records: {shares}")
        if any(count < 1 for count in (*self.sessions, *self.reads)):
            raise ValueError("numbers of sessions are positive")
        for points in self.reads.values():
            if not points or not all(0 < memory < 1 and 0 <= read <= 1 for memory, read in points):
                raise ValueError(f"shares in memory and shares read lie between 0 and 1, not {points}")
            if any(right <= left or fewer > more for (left, more), (right, fewer) in pairwise(points)):
                raise ValueError(f"more memory never reads more: {points}")

    def needed(self, tokens: int, sessions: int = 1) -> float:
        """The share that `tokens` consecutive tokens of each of `sessions` sessions need together.

        Sessions share neurons: n of them count as somewhat fewer independent ones, as many as explain the measured
        shares of one token of each.
        """
        if tokens == 0:
            return 0.0
        alone = min(_NEARLY_ALL, self._alone(tokens))
        return -math.expm1(self._independent(sessions) * math.log1p(-alone))

    def newly_read(self, window: float, sessions: int = 1, tokens: int = 1) -> float:
        """The share that is not in memory, if that of the last `window` tokens of every session is: s_agg(k+1) -
        s_agg(k) of the paper, and linear between whole numbers.

        Args:
            tokens: of each session that are computed at once.
        """
        whole = math.floor(window)
        new = self._growth(whole, sessions, tokens)
        if window > whole:
            new += (window - whole) * (self._growth(whole + 1, sessions, tokens) - new)
        return max(0.0, min(new, self.needed(tokens, sessions)))

    def window(self, share: float, sessions: int = 1) -> float:
        """The tokens of each session, up to `MAX_WINDOW`, whose records are such a share of all: the window that fits
        into memory, linear between whole numbers."""
        below = 0.0
        for tokens in range(1, MAX_WINDOW + 1):
            above = self.needed(tokens, sessions)
            if above > share:
                return tokens - 1 + max(0.0, share - below) / (above - below)
            below = above
        return float(MAX_WINDOW)

    def read(self, memory: float, sessions: int = 1, tokens: int = 1) -> float:
        """The share that is read for `tokens` tokens of each of `sessions` sessions, computed together, if memory has
        room for the share `memory` of the records."""
        if memory >= 1:
            return 0.0
        counts = sorted(self.reads)
        if sessions not in counts and (len(counts) < 2 or sessions < counts[0]):
            return self.newly_read(self.window(memory, sessions), sessions, tokens)
        each = [(math.log(count), self._measured(memory, count)) for count in counts]
        # A session's next tokens read a little less than the first, since they share neurons.
        one = max(0.0, interpolated(each, math.log(sessions)))
        return min(tokens * one, self.needed(tokens, sessions))

    def _measured(self, memory: float, sessions: int) -> float:
        """What was measured for a share in memory, at a number of sessions that was measured: linear in between."""
        without_memory = max(self.needed(1, sessions), self.reads[sessions][0][1])
        return interpolated([(0.0, without_memory), *self.reads[sessions], (1.0, 0.0)], memory)

    def _growth(self, window: int, sessions: int, tokens: int) -> float:
        return self.needed(window + tokens, sessions) - self.needed(window, sessions)

    def _alone(self, tokens: int) -> float:
        """s_agg(tokens). Beyond what was measured, it grows by steps that shrink as the last two did."""
        known = len(self.tokens)
        if tokens <= known:
            return self.tokens[tokens - 1]
        steps = [later - earlier for earlier, later in pairwise((0.0, *self.tokens))]
        ratio = 1 - steps[0]  # of independent tokens
        if known > 1:
            ratio = min(1.0, steps[-1] / steps[-2]) if steps[-2] > 0 else 0.0
        more = tokens - known
        growth = more * ratio if ratio == 1 else ratio * (1 - ratio**more) / (1 - ratio)
        return min(1.0, self.tokens[-1] + steps[-1] * growth)

    def _independent(self, sessions: int) -> float:
        """The number of independent sessions that need as much as `sessions` real ones."""
        one = math.log1p(-min(_NEARLY_ALL, self.tokens[0]))
        points = [(0.0, 0.0)]  # logarithms of both numbers
        for count in sorted(self.sessions):
            if count > 1:
                independent = math.log1p(-min(_NEARLY_ALL, self.sessions[count])) / one
                points.append((math.log(count), math.log(min(count, max(1.0, independent)))))
        return min(sessions, math.exp(interpolated(points, math.log(sessions), slope=1.0)))


def interpolated(points: list[tuple[float, float]], place: float, slope: float = 0.0) -> float:
    """The value at `place` of the line through `points`, which are in order of place.

    Beyond the last point the last piece goes on; `slope` is that of the line if there is one point only. Before the
    first point the value is that of the first.
    """
    if place <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        slope = (high - low) / (right - left)
        if place <= right:
            return low + slope * (place - left)
    return points[-1][1] + slope * (place - points[-1][0])
