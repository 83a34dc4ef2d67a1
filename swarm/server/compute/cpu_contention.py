"""Whether other programs compete with this process for the machine's processors."""

from __future__ import annotations

import time

import psutil

SAMPLE_PERIOD_S = 0.5
"""Seconds between measurements."""

CONTENTION_START, CONTENTION_FULL = 0.55, 0.65
"""Shares of all processors in use at which contention starts and at which it is full. Where programs take turns, as a
chain of servers on one machine does, some processor is idle most of the time."""

OWN_USE_SHARE = 0.8
"""Above this share of the processor time in use, this process is the one that uses the machine."""


def cpu_contention(used: float, own: float) -> float:
    """Contention from 0 (the machine is free for this process) to 1 (other programs use all that it does not).

    Args:
        used: share of all processors in use.
        own: share of all processors that this process uses.
    """
    if own > OWN_USE_SHARE * used:
        return 0.0
    return min(1.0, max(0.0, (used - CONTENTION_START) / (CONTENTION_FULL - CONTENTION_START)))


class CpuContentionMeter:
    """Measures CPU contention, at most once per `SAMPLE_PERIOD_S`, whenever it is asked."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._measured_at = -SAMPLE_PERIOD_S
        self._level = 0.0

    def level(self) -> float:
        """The latest `cpu_contention`."""
        now = time.monotonic()
        if now - self._measured_at >= SAMPLE_PERIOD_S:
            self._measured_at = now
            own = self._process.cpu_percent() / (psutil.cpu_count() or 1)
            self._level = cpu_contention(psutil.cpu_percent() / 100, own / 100)
        return self._level
