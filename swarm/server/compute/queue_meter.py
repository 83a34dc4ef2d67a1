"""How long steps wait for the compute thread, as a server announces it. Pure: the clock is handed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE_S = 10.0
"""Seconds in which what was seen loses all but 1/e of its weight."""

MAX_REMEMBERED_JOBS = 10.0
"""Jobs' weight that is kept at most, so that after a burst the estimate turns to what comes next, or fades."""


@dataclass(frozen=True, slots=True)
class _WaitSums:
    """Sums over the jobs, each weighted by its age."""

    waited: float
    jobs: float
    when: float

    def aged(self, now: float) -> _WaitSums:
        keep = math.exp(-max(0.0, now - self.when) / FADE_S)
        return _WaitSums(self.waited * keep, self.jobs * keep, max(self.when, now))


class QueueMeter:
    """Weighted mean of waiting times. With no job's weight left in it the mean fades to 0: nobody waits.

    One thread may call `started` while another calls `seconds`.
    """

    def __init__(self) -> None:
        self._seen = _WaitSums(0.0, 0.0, -math.inf)

    def started(self, waited: float, now: float) -> None:
        """A job began at `now` after it had waited for `waited` seconds."""
        before = self._seen.aged(now)
        waits, jobs = before.waited + max(0.0, waited), before.jobs + 1
        scale = min(1.0, MAX_REMEMBERED_JOBS / jobs)
        self._seen = _WaitSums(waits * scale, jobs * scale, before.when)

    def seconds(self, now: float) -> float:
        """What a job that came at `now` may expect to wait."""
        seen = self._seen.aged(now)
        return seen.waited / max(seen.jobs, 1.0)
