"""Memory of peers over time: what each process has for itself, and what its libp2p daemon takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

WARM_UP_S = 600.0
"""What every process takes in its first minutes is no growth: it imports and compiles on first use, its allocators and
thread pools reach their size, and its tables of peers fill. Of these the measured round trips, which live for ten
minutes, take longest to reach their size; what remembers peers for longer holds some hundred bytes for each."""

WINDOW_S = 300.0
"""The samples whose median stands for the beginning, and for the end."""


@dataclass(frozen=True)
class MemorySample:
    """Unshared memory of a peer's process and resident memory of its libp2p daemon, in bytes."""

    when: float
    own: int
    daemon: int


@dataclass(frozen=True)
class Growth:
    """How much memory a peer had at the beginning and at the end, in bytes; `seconds` lie between these."""

    first: float
    last: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.last - self.first


@dataclass
class PeerMemory:
    """The memory of one peer over its life.

    Attributes:
        samples: in the order of time.
    """

    samples: list[MemorySample] = field(default_factory=list)

    @property
    def life_s(self) -> float:
        """Seconds between the first sample and the last."""
        return self.samples[-1].when - self.samples[0].when if self.samples else 0.0

    def take_sample(self, pid: int) -> None:
        """Look at the process, if it still runs."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            daemon = sum(child.memory_info().rss for child in process.children())
            self.samples.append(MemorySample(time.monotonic(), process.memory_full_info().uss, daemon))

    def growth(self) -> Growth:
        """Of the process itself, after its warm-up."""
        return growth([(sample.when, sample.own) for sample in self.samples])

    def daemon_growth(self) -> Growth:
        """Of its libp2p daemon, after its warm-up."""
        return growth([(sample.when, sample.daemon) for sample in self.samples])


def growth(samples: Sequence[tuple[float, float]]) -> Growth:
    """From the median of the first minutes after the warm-up to the median of the last minutes.

    In a short life, its first quarter is the warm-up, and a quarter of it takes the place of these minutes.

    Args:
        samples: (seconds, bytes), in the order of time; not empty.
    """
    began, ended = samples[0][0], samples[-1][0]
    quarter = (ended - began) / 4
    warm, window = began + min(WARM_UP_S, quarter), min(WINDOW_S, quarter)
    first = [sample for sample in samples if warm <= sample[0] <= warm + window] or samples[:1]
    last = [sample for sample in samples if sample[0] >= ended - window]
    return Growth(
        statistics.median(size for _, size in first),
        statistics.median(size for _, size in last),
        statistics.median(when for when, _ in last) - statistics.median(when for when, _ in first),
    )
