"""The steps of a session that some server may still have to answer: their numbers, epochs, and what goes in. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.client.hops.input_history import Step
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import StepLayout
from swarm.protocol.messages import ExitTerms


class StepsUnderWay:
    """Numbers the steps of one session. Numbers only grow; a step that is given up leaves a gap.

    Attributes:
        steps: by number, ascending, with what went into the first server.
        next_number: of the step that begins next.
        epoch: of the step before (see `StepRequest`).
    """

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.next_number = 0
        self.epoch = 0
        self._forgotten: int | None = None
        """The last step that stands of those that were forgotten; None if there is none."""
        self._lengths: tuple[int, ...] | None = ()
        """Of each sequence after the last step; None if that was given up, so that some servers may have more."""

    def begin_at(self, length: int) -> None:
        """Before the first step: there is one sequence, of so many tokens, from an earlier session."""
        self._lengths = (length,)

    def appends(self, layout: StepLayout) -> bool:
        """Whether a step does nothing but continue what all sequences have."""
        lengths = (0,) * layout.sequences if self._lengths == () else self._lengths
        return layout.sources is None and layout.starts == lengths

    def add(
        self,
        parts: Sequence[tuple[PackedHidden, StepLayout]],
        exits: ExitTerms | None = None,
        exit_block: int | None = None,
    ) -> list[Step]:
        """Take in steps, each of which continues the one before; the first may begin an epoch.

        Args:
            exits, exit_block: see `Step`.
        """
        first, layout, follows = self.next_number, parts[-1][1], None
        if not self.appends(parts[0][1]):
            self.epoch, follows = first, max(self.steps, default=self._forgotten)
        added = []
        for number, (hidden, one) in enumerate(parts, first):
            # A copy, because the caller may change a tensor that the payload is a view of.
            kept = PackedHidden(bytes(hidden.payload), hidden.tokens, hidden.hidden_size, hidden.wire, hidden.dtype)
            before = follows if number == first else None
            added.append(Step(number, one, kept, self.epoch, before, exits, exit_block))
        self.steps.update((step.number, step) for step in added)
        self.next_number = first + len(parts)
        self._lengths = tuple(start + count for start, count in zip(layout.starts, layout.counts, strict=True))
        return added

    def upcoming(self, done: int) -> tuple[int, int]:
        """Number and epoch of the first step after number `done`; of the one that begins next if there is none."""
        step = next((step for number, step in self.steps.items() if number > done), None)
        return (step.number, step.epoch) if step is not None else (self.next_number, self.epoch)

    def rows(self, done: int) -> int:
        """The most rows of a step after number `done`; 1 if there is none."""
        return max((step.layout.sequences for number, step in self.steps.items() if number > done), default=1)

    def give_up_after(self, after: int) -> list[Step]:
        """Take out the steps behind number `after`."""
        self._lengths = None
        return [self.steps.pop(number) for number in list(self.steps) if number > after]

    def forget(self, done: int) -> None:
        """All servers have answered the steps up to number `done`."""
        for number in [number for number in self.steps if number <= done]:
            del self.steps[number]
            self._forgotten = number
