"""Whether other programs want this machine's processors."""

from __future__ import annotations

import time

import psutil

SAMPLE_PERIOD_S = 0.5
"""Seconds between looks."""

CONTENTION_START, CONTENTION_FULL = 0.55, 0.65
"""Share of all processors in use, from where on a machine counts as a little crowded, and as entirely crowded. Where
programs take turns, as a chain of servers on one machine does, some processor is idle at most times."""

OWN_USE_SHARE = 0.8
"""Share of what is in use, from which on it is this process that uses it."""


def cpu_contention(used: float, mine: float) -> float:
    """0 (the machine is this process's) to 1 (whatever it does not use, others do).

    Args:
        used: share of all processors that was in use.
        mine: the part of it that this process used, as a share of all processors, too.
    """
    if mine > OWN_USE_SHARE * used:
        return 0.0
    return min(1.0, max(0.0, (used - CONTENTION_START) / (CONTENTION_FULL - CONTENTION_START)))


class CpuContentionMeter:
    """This machine's processors. Looks at them now and then, when it is asked."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked = -SAMPLE_PERIOD_S
        self._level = 0.0

    def level(self) -> float:
        """See `cpu_contention`, over the last moments."""
        now = time.monotonic()
        if now - self._looked >= SAMPLE_PERIOD_S:
            self._looked = now
            mine = self._process.cpu_percent() / (psutil.cpu_count() or 1)
            self._level = cpu_contention(psutil.cpu_percent() / 100, mine / 100)
        return self._level
