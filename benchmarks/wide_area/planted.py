"""A draft of any quality."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from swarm.client.speculation.drafts import Choose, Context, Draft, Guess


class PlantedDraft(Draft):
    """A draft that is right with a probability, and does not know when.

    Args:
        right: the probability.
        truth: the right token of a position.
        elapse: is told how long each guess takes.
    """

    name = "planted"

    def __init__(
        self,
        right: float,
        seed: int,
        truth: Callable[[int], int],
        vocabulary: int,
        elapse: Callable[[], object] = lambda: None,
    ) -> None:
        self._right, self._random, self._truth = right, random.Random(seed), truth
        self._vocabulary, self._elapse = vocabulary, elapse

    def propose(self, context: Context, count: int, choose: Choose) -> Sequence[Guess]:
        guesses = []
        for position in range(len(context.tokens), len(context.tokens) + count):
            self._elapse()
            token = self._truth(position)
            if self._random.random() >= self._right:
                token = (token + 1) % self._vocabulary
            guesses.append(Guess(token, 0.7))
        return guesses
