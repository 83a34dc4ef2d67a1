"""How a loop of this client chooses tokens that may have been guessed before: what is drawn depends on the position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.client.threads.compute_lock import RandomState


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, as transformers' `generate` has prepared it.

    Attributes:
        process: sequences `[R, T]` and logits `[R, V]` to processed logits.
        is_finished: sequences `[R, T]` to whether each is finished, `[R]` bool. Asked once for each token that stands.
        sample: whether tokens are drawn at random, or are the likeliest.
        pad: token that follows the end of a sequence; None if sequences have no end.
        ends: tokens that end a sequence; None if none does.
        max_length: of a sequence.
    """

    process: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_finished: Callable[[torch.Tensor], torch.Tensor]
    sample: bool
    pad: torch.Tensor | None
    ends: torch.Tensor | None
    max_length: int


class PositionNoise:
    """Random numbers of each position of a batch of texts, with which tokens are drawn there, however often.

    Those of a position are what `torch.multinomial` would use, and positions follow one another. So the tokens, and the
    state of torch's generator behind them, are those of transformers' own loop.
    """

    def __init__(self) -> None:
        self._noise: dict[int, tuple[torch.Tensor, RandomState]] = {}
        self._next: int | None = None

    def draw(self, probabilities_RV: torch.Tensor, position: int) -> torch.Tensor:
        """The tokens `[R]` of a position. Positions before the first one are not asked for."""
        if self._next is None:
            self._next = position
        while self._next <= position:
            noise_RV = torch.empty_like(probabilities_RV).exponential_()
            self._noise[self._next] = noise_RV, RandomState(noise_RV.device)
            self._next += 1
        return (probabilities_RV / self._noise[position][0]).argmax(-1)

    def forget(self, before: int) -> None:
        """The tokens before a position stand."""
        for position in [one for one in self._noise if one < before - 1]:
            del self._noise[position]

    def end(self, length: int) -> None:
        """No token is drawn any more: the texts have this many."""
        if length - 1 in self._noise:
            self._noise[length - 1][1].restore()
