"""How long steps that nothing waits for should wait for more of their session, to be computed with them. Pure: events
come in, a number of seconds comes out.

A client that cuts a server's span into parts writes tokens from the first part, and has the later part verify them.
Several steps cost the later part hardly more than one. But if it begins as soon as it has one, the next step of the
first part, which the client waits for, comes while it computes and has to wait. So the first step waits for others.

How many are best follows from times and from how often guesses stand. If the first part takes `a` a step (including the
client's turn), the later part `b` for all of them, and a guess stands with probability p, then k steps give
1 + p + ... + p^(k-1) tokens in k a + b seconds. (This is the choice of the draft length in speculative decoding:
Leviathan et al. 2023, section 3.3, with drafts that cost `a`.)

If the next step does not come when it should, the client waits for the verification, and nothing is gained by waiting.
Nor is it if the client is so far away that the later part would be done before the next step comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, MAX_YIELD_S

KEPT_SHARE = 0.8
"""What the next observation leaves of an average of those before."""

LATE_FACTOR = 2.0
"""A step is late if it takes so many times as long as usual to come."""

MIN_WAIT_S = 1e-4
"""No wait is shorter: timers are not exact."""

PRIOR_KEPT, PRIOR_MISSED = 4.0, 1.0
"""Guesses that count as if they had been verified before, and how many of them as wrong."""


def best_count(first_s: float, later_s: float, stands: float) -> int:
    """The number of steps to compute as one with which verified tokens come quickest.

    Args:
        first_s: seconds that each step takes before it comes to the later part.
        later_s: seconds that the later part takes for all of them.
        stands: probability that a guess stands.
    """

    def tokens_per_second(count: int) -> float:
        return sum(stands**number for number in range(count)) / max(1e-9, count * first_s + later_s)

    return max(range(1, MAX_SHORT_TOKENS + 1), key=tokens_per_second)


@dataclass
class StepGathering:
    """What is known of one session's steps on their way from one part of a span to the next. Times are in seconds.

    Attributes:
        away: from the outputs of a step to the client's next one, if the client does not wait for the later part.
        first: that a step takes in the first part.
        later: that the later part took last.
    """

    away: float | None = None
    first: float | None = None
    later: float | None = None
    _came_at: float | None = None
    _pushed_at: float | None = None
    _undisturbed: bool = False
    _epoch: int = -1
    _epoch_start: int = 0
    _epoch_kept: int = 0
    _epoch_newest: int = 0
    _kept: float = PRIOR_KEPT
    _missed: float = PRIOR_MISSED

    @property
    def stands(self) -> float:
        """The probability that a guess stands, as far as the session has shown."""
        return 1 - self._missed / (self._kept + self._epoch_kept)

    def on_step(self, now: float, ahead: bool, computing: bool) -> None:
        """The first part has got a step.

        Args:
            ahead: the later part has not answered the step before it.
            computing: the later part computes.
        """
        if ahead and self._pushed_at is not None:
            self.away = _averaged(self.away, now - self._pushed_at)
        self._came_at, self._undisturbed = now, not computing

    def on_push(self, now: float, epoch: int, starts: Sequence[int]) -> None:
        """The first part has computed a step, which begins at these positions."""
        if self._came_at is not None and self._undisturbed:
            self.first = _averaged(self.first, now - self._came_at)
        self._came_at, self._pushed_at = None, now
        if epoch != self._epoch:
            if self._epoch_newest:
                self._kept = KEPT_SHARE * self._kept + max(1, starts[0] - self._epoch_start)
                self._missed = KEPT_SHARE * self._missed + 1
            self._epoch, self._epoch_start, self._epoch_kept, self._epoch_newest = epoch, starts[0], 0, 0

    def on_computed(self, steps: int, epoch: int, seconds: float) -> None:
        """The later part has computed some steps."""
        self.later = seconds
        if epoch == self._epoch:
            self._epoch_kept += self._epoch_newest  # or the client would have given up these
            self._epoch_newest = steps

    def delay(self, waiting: int, waited: float, now: float) -> float:
        """Seconds that the steps should wait for another one; 0 if they should be computed now.

        Args:
            waiting: number of steps.
            waited: seconds that the first of them has waited.
        """
        if self.away is None or self.first is None or self.later is None or self._pushed_at is None:
            return 0.0
        if self.away >= self.later or waiting >= best_count(self.away + self.first, self.later, self.stands):
            return 0.0
        left = MAX_YIELD_S - waited
        if self._came_at is None:
            left = min(left, self._pushed_at + LATE_FACTOR * self.away - now)
        return left if left >= MIN_WAIT_S else 0.0


def _averaged(before: float | None, value: float) -> float:
    return value if before is None else KEPT_SHARE * before + (1 - KEPT_SHARE) * value
