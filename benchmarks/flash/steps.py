"""Tokens through blocks: what the benchmarks of weights on flash time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.flash.files import OPT, OptShape

CONTEXT = 128
"""Tokens in the cache before the first one, as in the paper."""

Step = Callable[[torch.Tensor, Any], torch.Tensor]
"""A block: hidden states and the cache to hidden states."""


def plain(block: Any) -> Step:
    """A block whose weights are where they have to be."""
    return lambda hidden, cache: block(hidden, past_key_values=cache)


class PreallocatedCache:
    """Keys and values of some blocks, in memory that is allocated once, as servers do.

    Begins with random ones for `CONTEXT` tokens.
    """

    def __init__(self, blocks: int, batch: int, tokens: int, dtype: torch.dtype, shape: OptShape) -> None:
        size = (2, blocks, batch, shape.heads, CONTEXT + tokens, shape.hidden // shape.heads)
        self._keys, self._values = torch.randn(size).to(dtype)
        self._lengths = [CONTEXT] * blocks

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, block: int, *other: Any, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a block's keys and values; returns all of them. transformers calls this."""
        start = self._lengths[block]
        end = self._lengths[block] = start + keys.shape[2]
        self._keys[block, :, :, start:end] = keys
        self._values[block, :, :, start:end] = values
        return self._keys[block, :, :, :end], self._values[block, :, :, :end]


@torch.inference_mode()
def seconds_a_token(
    blocks: Sequence[Step], tokens: int, batch: int, dtype: torch.dtype, shape: OptShape = OPT
) -> float:
    """Time of one token of each sequence, the mean of some."""
    cache = PreallocatedCache(len(blocks), batch, tokens, dtype, shape)
    inputs = torch.randn(tokens, batch, 1, shape.hidden).to(dtype)
    began = time.perf_counter()
    for hidden in inputs:
        for block in blocks:
            hidden = block(hidden, cache)
    return (time.perf_counter() - began) / tokens
