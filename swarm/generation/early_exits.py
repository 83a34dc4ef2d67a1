"""What a sequence tells of tokens that leave early: how many, and their text before they are verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from swarm.client.routes.events import ExitTaken, ExitVerified

ExitCounts = Counter[tuple[int, str]]
"""Guesses in front of a block that were "taken", and how many of them "stood" or were "given_up"."""


def count_exit(counts: ExitCounts, event: ExitTaken | ExitVerified) -> None:
    """Count one event of a sequence's session."""
    became = "taken" if isinstance(event, ExitTaken) else "stood" if event.stands else "given_up"
    counts[event.block, became] += 1


def exit_details(parts: Iterable[ExitCounts]) -> list[dict[str, Any]]:
    """The counts of several sequences together as JSON, by block. Other threads may go on counting meanwhile."""
    total: ExitCounts = Counter()
    for part in parts:
        total.update(part.copy())
    blocks = sorted({block for block, _ in total})
    return [
        {"block": block, **{what: total[block, what] for what in ("taken", "stood", "given_up")}} for block in blocks
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
