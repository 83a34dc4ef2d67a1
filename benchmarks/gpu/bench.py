"""What the cases of a step are given: the device, how large things may be, and what was measured before."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.gpu.records import Journal, Measured

T = TypeVar("T")


class WrongResult(Exception):
    """Something was computed, and it is not what the reference computes."""


class NotHere(Exception):
    """This machine, or the time that is left, does not allow a case; the message says why."""


class Bench:
    """A machine for the cases of one step.

    Args:
        device: the card, or what stands in for it.
        real: whether it is a card.
        journal: where records of earlier steps are.
        deadline: `time.monotonic()` by which the step has to be over.
    """

    def __init__(self, device: torch.device, real: bool, journal: Journal, deadline: float) -> None:
        self.device = device
        self.real = real
        self.journal = journal
        self.deadline = deadline
        self._kept: tuple[Hashable, object] | None = None

    @property
    def seconds_left(self) -> float:
        """How long the step may still take."""
        return self.deadline - time.monotonic()

    def sized(self, on_card: T, on_stand_in: T) -> T:
        """The first on a card; the second, which is small, where there is none."""
        return on_card if self.real else on_stand_in

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once for cases that ask for the same key in a row. Only one thing is kept."""
        if self._kept is None or self._kept[0] != key:
            self.forget()
            self._kept = key, make()
        found: T = self._kept[1]  # type: ignore[assignment]
        return found

    def forget(self) -> None:
        """Free what was kept."""
        self._kept = None
        gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Memory of the card that is free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def rate(self, case: str, figure: str, measure: Callable[[Bench], float]) -> float:
        """A figure that the first step has measured; measured now if that step did not get so far."""
        for record in self.journal.records("card"):
            if record.case == case and figure in record.values:
                return float(record.values[figure])
        return measure(self)


@dataclass(frozen=True)
class Case:
    """One thing to try or to measure.

    Attributes:
        name: unique in its step.
        run: does it. Raises `WrongResult`, `NotHere`, or whatever goes wrong.
        seconds: how long it takes on a card, about; it is not begun if less time is left.
    """

    name: str
    run: Callable[[Bench], Measured]
    seconds: float = 2.0


@dataclass(frozen=True)
class Step:
    """Cases that share a process, as long as none of them ends it.

    Attributes:
        name: for options and records.
        title: for the report.
        seconds: the most that it may take.
        cases: what there is to do on a machine.
    """

    name: str
    title: str
    seconds: float
    cases: Callable[[Bench], Sequence[Case]]


def seconds_of(device: torch.device, function: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of a call, by the card's own clock: the least of a few after one that is not counted."""
    times = []
    for _ in range(1 + repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        torch.cuda.synchronize(device)
        times.append(first.elapsed_time(last) / 1e3)
    return min(times[1:])
