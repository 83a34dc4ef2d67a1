"""Where generated tokens go: to the caller's streamer once they stand, or before if it takes provisional ones."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class ProvisionalStreamer(Protocol):
    """A streamer that also takes tokens that left early, as soon as they are chosen.

    `put` takes a token of each sequence once it stands, as with every streamer. If provisional ones are shown then, it
    is the first of them: those that are wrong were taken back before.
    """

    def put(self, value: torch.Tensor) -> None:
        """The prompts, `[sequences, tokens]`, and then tokens that stand, `[sequences]`."""

    def put_provisional(self, value: torch.Tensor) -> None:
        """Tokens `[sequences]` that follow all before, provisional ones included, and may be taken back."""

    def take_back(self, count: int) -> None:
        """The last `count` provisional tokens of each sequence were wrong."""

    def end(self) -> None:
        """The text is complete."""


class TokenOutput:
    """The tokens of one `generate` call on their way to its streamer.

    Args:
        streamer: transformers' or a `ProvisionalStreamer`; None for none.
    """

    def __init__(self, streamer: Any = None) -> None:
        self._streamer = streamer
        self._provisional_streamer = streamer if isinstance(streamer, ProvisionalStreamer) else None
        self._provisional = 0

    def put(self, tokens_R: torch.Tensor) -> None:
        """The next token of each sequence stands: the first provisional one, if there are any."""
        self._provisional = max(0, self._provisional - 1)
        if self._streamer is not None:
            self._streamer.put(tokens_R.cpu())

    def put_provisional(self, tokens_R: torch.Tensor) -> None:
        """A token of each sequence that left early follows those before."""
        self._provisional += 1
        if self._provisional_streamer is not None:
            self._provisional_streamer.put_provisional(tokens_R.cpu())

    def keep_provisional(self, count: int) -> None:
        """Take back all provisional tokens but the first `count`."""
        wrong, self._provisional = self._provisional - count, min(self._provisional, count)
        if wrong > 0 and self._provisional_streamer is not None:
            self._provisional_streamer.take_back(wrong)

    def end(self) -> None:
        """The text is complete."""
        if self._streamer is not None:
            self._streamer.end()
