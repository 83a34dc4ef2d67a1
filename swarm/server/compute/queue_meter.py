"""How long requests wait for the compute thread, as a server announces it. Pure: times are passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE_S = 10.0
"""Seconds in which an observation loses all but 1/e of its weight."""

MAX_REMEMBERED_JOBS = 10.0
"""Weight, in jobs, of all that is remembered, so that after a burst the estimate follows what comes next, or fades."""


@dataclass(frozen=True, slots=True)
class _WaitSums:
    """Sums over all jobs, each weighted by its age."""

    waited: float
    jobs: float
    updated_at: float

    def aged(self, now: float) -> _WaitSums:
        keep = math.exp(-max(0.0, now - self.updated_at) / FADE_S)
        return _WaitSums(self.waited * keep, self.jobs * keep, max(self.updated_at, now))


class QueueMeter:
    """Weighted mean of waiting times, which fades to 0 while no jobs come.

    One thread may call `record_start` while another calls `expected_wait`.
    """

    def __init__(self) -> None:
        self._sums = _WaitSums(0.0, 0.0, -math.inf)

    def record_start(self, waited: float, now: float) -> None:
        """Count a job that started at `now` after it had waited for `waited` seconds."""
        before = self._sums.aged(now)
        waits, jobs = before.waited + max(0.0, waited), before.jobs + 1
        scale = min(1.0, MAX_REMEMBERED_JOBS / jobs)
        self._sums = _WaitSums(waits * scale, jobs * scale, before.updated_at)

    def expected_wait(self, now: float) -> float:
        """Seconds that a job which arrives at `now` may expect to wait."""
        sums = self._sums.aged(now)
        return sums.waited / max(sums.jobs, 1.0)
