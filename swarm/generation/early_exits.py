"""What a sequence tells of tokens that leave early: how many, and their text before they are verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.client.routes.events import ExitTaken, ExitVerified


@dataclass
class _BoundaryCounts:
    """Guesses in front of one block, and how many of them stood or were given up."""

    taken: int = 0
    stood: int = 0
    given_up: int = 0


@dataclass
class ExitCounts:
    """Counts of one sequence's exits. One thread counts; others may read."""

    _boundaries: dict[int, _BoundaryCounts] = field(default_factory=dict)

    def count(self, event: ExitTaken | ExitVerified) -> None:
        """Count one event of the sequence's session."""
        counts = self._boundaries.setdefault(event.block, _BoundaryCounts())
        if isinstance(event, ExitTaken):
            counts.taken += 1
        elif event.stands:
            counts.stood += 1
        else:
            counts.given_up += 1

    @classmethod
    def total(cls, parts: Iterable[ExitCounts]) -> ExitCounts:
        """The counts of several sequences together."""
        total = cls()
        for part in parts:
            for block, counts in list(part._boundaries.items()):
                sums = total._boundaries.setdefault(block, _BoundaryCounts())
                sums.taken += counts.taken
                sums.stood += counts.stood
                sums.given_up += counts.given_up
        return total

    def details(self) -> list[dict[str, Any]]:
        """The counts as JSON, by block."""
        return [
            {"block": block, "taken": counts.taken, "stood": counts.stood, "given_up": counts.given_up}
            for block, counts in sorted(self._boundaries.items())
        ]


class ProvisionalText:
    """A streamer of one sequence (`swarm.client.early_exit.token_output`) that keeps its provisional text up to date.

    Args:
        preview: the text that these tokens would add to the output.
        show: called with the whole provisional text whenever it changes.
    """

    def __init__(self, preview: Callable[[Sequence[int]], str], show: Callable[[str], None]) -> None:
        self._preview, self._show = preview, show
        self._tokens: list[int] = []
        self._shown = ""

    def put(self, value: torch.Tensor) -> None:
        """A token stands. Output may have come with it, so what is left is shown again."""
        del self._tokens[:1]
        self._update(again=True)

    def put_provisional(self, value: torch.Tensor) -> None:
        """A token follows that may be taken back."""
        self._tokens.append(int(value))
        self._update()

    def take_back(self, count: int) -> None:
        """The last tokens were wrong."""
        del self._tokens[-count:]
        self._update()

    def end(self) -> None:
        """The text is complete."""

    def _update(self, again: bool = False) -> None:
        text = self._preview(self._tokens)
        if text != self._shown or (again and text):
            self._shown = text
            self._show(text)
