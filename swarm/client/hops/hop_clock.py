"""When the awaited answers of one server are due, and how long its answers took. Pure: the time is handed in."""

from __future__ import annotations

from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.data_structures import HopTiming

NO_DEADLINE = float("inf")


class HopClock:
    """The deadline of the steps under way at one server. Times are seconds on the clock of the caller.

    The steps under way share one deadline, which runs from when the first of them became the server's next one.

    Attributes:
        deadline: when the next answer should have come; infinite if none is awaited.
        timing: what the steps of the newest call took together; None before the first answer.
        slowness: how many times longer than usual the last answer took whose start is known.
        measured: how many answers have told how long the server takes.

    Args:
        timeouts: learns from the answers how long they may take.
    """

    def __init__(self, timeouts: TimeoutEstimator) -> None:
        self.deadline = NO_DEADLINE
        self.timing: HopTiming | None = None
        self.slowness = 1.0
        self.measured = 0
        self._usual = NO_DEADLINE
        self._newest: tuple[float, int] | None = None
        self._timeouts = timeouts
        self._start = 0.0
        self._timed_step: int | None = None
        """The step that is known to have become the server's next one at `_start`."""

    def timeout(self, tokens: int) -> float:
        """Seconds that `tokens` may take."""
        return self._timeouts.timeout(tokens)

    def refill_seconds(self, tokens: int) -> float:
        """What it takes to fill an empty cache with `tokens` tokens, at the best that was seen."""
        return self._timeouts.refill_seconds(tokens)

    def late_at(self, slowness: float = 1.0) -> float:
        """When the next answer is later than usual; infinite if none is awaited.

        Args:
            slowness: how many times longer than usual answers take just now.
        """
        return self._start + slowness * self._usual if self.deadline < NO_DEADLINE else NO_DEADLINE

    def waited(self, now: float) -> float:
        """Seconds since the first step under way became the server's next one."""
        return now - self._start

    def excuse(self, seconds: float) -> None:
        """This client itself stood still for so long: that is not the server's time."""
        self._start += seconds
        self.deadline += seconds

    def on_expected(self, now: float) -> None:
        """A step is going to come to the server."""
        self._start = now

    def on_handed(self, number: int, first: int, tokens: int, now: float, first_tokens: int | None = None) -> None:
        """Step `number` is on its way to the server, where `first` is the next one.

        Args:
            tokens: of all steps under way.
            first_tokens: of the next one; None if that is the only one.
        """
        if number == first:
            self._start, self._timed_step = now, number
        self.deadline = self._start + self._timeouts.timeout(tokens)
        self._usual = self._timeouts.late_after(first_tokens if first_tokens is not None else tokens)

    def on_reply(
        self, number: int, tokens: int, compute_seconds: float, continues: bool, now: float, full: bool = True
    ) -> None:
        """The server has answered a step of so many tokens, which `continues` the call of the step before.

        Args:
            full: the tokens have passed all blocks. Others take less time, which says nothing about these.
        """
        seconds = compute_seconds  # if the answer overtakes the notice of a push, the step's start is not known
        if self._timed_step == number:
            seconds = now - self._start
            if full:
                self.slowness = self._timeouts.observe(seconds, tokens)
                self.measured += 1
                self._newest = seconds, tokens
        timing = HopTiming(seconds, compute_seconds)
        if self.timing is not None and continues:
            timing = HopTiming(self.timing.total + timing.total, self.timing.compute + timing.compute)
        self.timing = timing
        self.deadline, self._start = NO_DEADLINE, now

    def take_measured(self) -> tuple[float, int] | None:
        """Seconds and tokens of the newest measured answer; None if there was none since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Nothing is under way."""
        self.deadline = NO_DEADLINE
