"""Which steps one server still has to answer, and what a reply is, judged by its step's number. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from swarm.client.wire.reply_checks import OutputShape

NO_STEP = -1
"""Stands for a step's number where there is no step."""


class ReplyKind(enum.Enum):
    """What the reply to a step is, judged by the step's number."""

    EXPECTED = "expected"
    LATE = "late"
    """The step was answered before or given up: the reply is ignored."""
    UNKNOWN = "unknown"
    """The server was never to get such a step."""


class AwaitedSteps:
    """The steps of one server that are expected, answered or given up.

    Attributes:
        replied: number of the last step that the server answered; it has answered all before.
        begun: number of the last step that had begun when the server took its place. Those that were given up before
            may still be pushed to it.
    """

    def __init__(self) -> None:
        self.replied = self.begun = NO_STEP
        self._expected: dict[int, OutputShape] = {}
        self._void: set[int] = set()
        self._newest = NO_STEP
        """Number of the newest step that was ever answered; `replied` goes back where a refill begins earlier."""

    def numbers(self) -> list[int]:
        """Steps that the server still has to answer, ascending."""
        replied, void = self.replied, self._void  # `is_past`, for all of them: this is asked for many times a step
        return sorted([number for number in self._expected if number > replied and number not in void])

    def outputs(self, number: int) -> OutputShape:
        """How much the answer to a step has to hold."""
        return self._expected[number]

    def tokens(self, numbers: Iterable[int]) -> int:
        """Tokens of some steps together."""
        return sum([self._expected[number].tokens for number in numbers])

    def largest_reply(self) -> int:
        """Values in the largest answer that may come now."""
        return max([outputs.values for outputs in self._expected.values()], default=0)

    @property
    def may_be_answered(self) -> bool:
        """Whether the server may still answer something, wanted or not."""
        return any(number > self.replied for number in self._expected)

    def is_past(self, number: int) -> bool:
        """Whether the step was answered (it was asked for twice) or given up."""
        return number <= self.replied or number in self._void

    def classify_reply(self, number: int) -> ReplyKind:
        """What a reply to step `number` is."""
        if self.is_past(number):
            return ReplyKind.LATE
        if number in self._expected:
            return ReplyKind.EXPECTED
        return ReplyKind.LATE if number <= max(self._newest, self.begun) else ReplyKind.UNKNOWN

    def expect(self, number: int, outputs: OutputShape) -> None:
        """A step is going to come to the server."""
        self._expected[number] = outputs

    def answer(self, number: int, first_of_call: int) -> bool:
        """The server has answered a step; whether it is newer than all that it ever answered.

        Args:
            first_of_call: steps from there on are remembered: what was asked for twice may be answered twice.
        """
        is_new = number > self._newest
        self.replied, self._newest = number, max(number, self._newest)
        oldest = min(number, first_of_call)
        self._expected = {step: outputs for step, outputs in self._expected.items() if step >= oldest}
        self._void = {step for step in self._void if step > number}
        return is_new

    def give_up(self, numbers: Iterable[int]) -> None:
        """Some steps are given up."""
        self._void.update(numbers)
