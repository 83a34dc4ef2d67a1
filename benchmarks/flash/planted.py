"""Planted activations: which neurons a token needs, drawn so that their sparsity and overlap are given ones. Pure.

No trained model of size can be had here, so the benchmark draws the neurons that a predictor would select. A share of
the neurons is needed by every token, and each other one with a probability of its own from a beta distribution, token
by token. Its two free numbers (the share and the spread of the distribution) are found such that the neurons of a
window, and those that the next token adds to them, have the shares that were measured on a real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STEPS = 60
"""Halvings of an interval in which a number is sought."""

MAX_LOG_SPREAD = math.log(1e6)


@dataclass(frozen=True)
class Measured:
    """What was measured on a model, as shares of a layer's neurons.

    Attributes:
        name: of the row in the tables.
        active: truly active for a token.
        selected: what the predictor selects for a token.
        window: tokens.
        resident: needed by `window` tokens together.
        newly: selected for a token and not among those of the `window` tokens before it.
    """

    name: str
    active: float
    selected: float
    window: int
    resident: float
    newly: float


PAPER = Measured("paper: OPT-6.7B", active=0.033, selected=0.1, window=5, resident=0.24, newly=0.024)
"""Sections 3.1 and 4.2: 97 % of the neurons inactive, three times as many selected, table 2."""


TRAINED = (Measured("trained here: small OPT", active=0.102, selected=0.104, window=3, resident=0.239, newly=0.049),)
"""A small model after half an hour of training, by `benchmarks.flash.quality`: its default predictors, the mean of its
layers. The window is about what half the memory has room for."""


@dataclass(frozen=True)
class PlantedNeurons:
    """The distribution of selected neurons.

    Attributes:
        always: share of the neurons that every token needs.
        mean, spread: of the beta distribution of the others' probabilities: mean `a / (a + b)`, spread `a + b`.
        active: share of the selected neurons that are truly active.
    """

    always: float
    mean: float
    spread: float
    active: float = 1.0

    @classmethod
    def like(cls, measured: Measured) -> PlantedNeurons:
        """The distribution with the shares that were measured.

        The window's share and what the next token adds can both be met only if they go together; otherwise the second
        is met exactly, which decides how much is read, and the first as far as possible.
        """
        active = measured.active / measured.selected

        def with_always(always: float) -> PlantedNeurons:
            mean = (measured.selected - always) / (1 - always)

            def newly(logarithm: float) -> float:
                return cls(always, mean, math.exp(logarithm)).newly(measured.window)

            return cls(always, mean, math.exp(_sought(newly, measured.newly, -MAX_LOG_SPREAD, MAX_LOG_SPREAD)), active)

        # The more neurons every token needs, the more of the change is that of few others, and the smaller the union.
        def fewer(always: float) -> float:
            return -with_always(always).needed(measured.window)

        def settled(always: float) -> float:
            return -with_always(always).newly(measured.window)

        limit = measured.selected * (1 - 1e-6)
        most = _sought(settled, -measured.newly * (1 - 1e-6), 0.0, limit)
        return with_always(_sought(fewer, -measured.resident, 0.0, most))

    def needed(self, tokens: int) -> float:
        """The share that so many tokens need together."""
        return self.always + (1 - self.always) * (1 - self._unneeded(tokens))

    def newly(self, window: int) -> float:
        """The share that a token adds to what the `window` tokens before it need."""
        return self.needed(window + 1) - self.needed(window)

    def draw(self, neurons: int, seed: int) -> PlantedLayer:
        """The neurons of one layer."""
        generator = np.random.default_rng(seed)
        a, b = self.mean * self.spread, (1 - self.mean) * self.spread
        probabilities = generator.beta(a, b, neurons)
        always = generator.permutation(neurons)[: round(self.always * neurons)]
        probabilities[always] = 1.0
        return PlantedLayer(probabilities, self.active, seed)

    def _unneeded(self, tokens: int) -> float:
        """The expected share of the other neurons that no token of so many needs."""
        a, b = self.mean * self.spread, (1 - self.mean) * self.spread
        return float(np.prod([(b + count) / (a + b + count) for count in range(tokens)]))


@dataclass(frozen=True)
class PlantedLayer:
    """One layer's neurons, and which of them tokens need.

    Attributes:
        probabilities: `[neurons]`, of being selected for a token.
        active: share of the selected neurons that are truly active.
        seed: the same numbers for the same seed.
    """

    probabilities: np.ndarray
    active: float
    seed: int

    def selected(self, token: int) -> np.ndarray:
        """The numbers of the neurons that are selected for a token, ascending."""
        drawn = np.random.default_rng((self.seed, token)).random(len(self.probabilities))
        return np.flatnonzero(drawn < self.probabilities)

    def truly_active(self, token: int) -> np.ndarray:
        """The selected neurons of a token that are truly active, ascending."""
        selected = self.selected(token)
        drawn = np.random.default_rng((self.seed, token, 1)).random(len(selected))
        return selected[drawn < self.active]


def _sought(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a function that never falls reaches the value `target`; an end if it lies beyond."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
