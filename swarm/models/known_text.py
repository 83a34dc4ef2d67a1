"""A text as a small causal language model of this process knows it: keys and values that are kept while it changes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from swarm.errors import UsageError


class KnownText:
    """Computes the logits behind texts of which each is like the one before, except for some tokens at its end.

    Args:
        model: a causal language model of transformers.

    Raises:
        UsageError: the model's cache cannot be cut.
    """

    def __init__(self, model: Any) -> None:
        if getattr(model, "_is_stateful", False):
            raise UsageError(
                f"a {type(model).__name__} cannot draft, because its state cannot go back where a guess was wrong; use "
                "a model with attention alone"
            )
        self._model = model
        self._known: list[int] = []
        self._cache = DynamicCache()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits `[V]` behind the last of at least one token."""
        same = min(common_length(self._known, tokens), len(tokens) - 1)
        if same < len(self._known):
            self._cache.crop(same - len(self._known))
        new_1T = torch.tensor([tokens[same:]], device=self._model.device)
        output = self._model(input_ids=new_1T, past_key_values=self._cache, use_cache=True)
        self._known = list(tokens)
        logits_V: torch.Tensor = output.logits[0, -1]
        return logits_V


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two texts have in common."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    # Slices compare fast, so the place is found by halving: all shorter beginnings are equal, all longer ones differ.
    return bisect_left(range(most), True, key=lambda length: first[: length + 1] != second[: length + 1])
