"""The text of tokens that left early and are not verified yet, for readers that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class ProvisionalText:
    """A streamer of one sequence (`swarm.client.early_exit.token_output`) that keeps its provisional text up to date.

    Args:
        preview: the text that these tokens would add to the output.
        show: is told the whole provisional text whenever it changes.
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
