"""Trials of ways of computing: what is not right or not faster on this machine is not used, and it is said why."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Trial(NamedTuple):
    """A way of computing that was tried, whether it is used, and why or why not."""

    way: str
    used: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.way}: {'used' if self.used else 'not used'}, {self.reason}"


class NotBetter(Exception):
    """A candidate is not used; the message says why."""


class Timing(NamedTuple):
    """Median seconds of a step of a candidate, and of what it would replace. True if the candidate is faster."""

    candidate: float
    other: float

    def __bool__(self) -> bool:
        return self.candidate < self.other

    def __str__(self) -> str:
        return f"{self.candidate * 1e3:.2f} ms a step instead of {self.other * 1e3:.2f}"


def is_faster(
    function: Callable[[], object],
    other: Callable[[], object],
    rounds: int = 15,
    clock: Callable[[], float] = time.thread_time,
) -> Timing:
    """Whether `function` takes less of this thread's time, or of another clock's, than `other`: medians of turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for one, seconds in zip((function, other), times, strict=True):
            began = clock()
            one()
            seconds.append(clock() - began)
    return Timing(statistics.median(times[0]), statistics.median(times[1]))


def attempt(what: str, trial: Callable[[], T], level: int = logging.DEBUG) -> tuple[T | None, str]:
    """The result of a trial, or None and why there is none.

    The one place where every error is expected: a trial runs a family's own code, torch's tracer and compiler, or a
    kernel on something that they may not support, and each of them has errors of its own.
    """
    try:
        return trial(), ""
    except NotBetter as refusal:
        logger.debug("%s is not better: %s", what, refusal)
        return None, str(refusal)
    except Exception as error:  # noqa: BLE001  (see above)
        logger.log(level, "%s is not possible here: %r", what, error)
        return None, f"it fails: {(str(error).splitlines() or [type(error).__name__])[0]}"
