"""Tokens through blocks: what the benchmarks of weights on flash time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.flash_files import OPT, OptShape
from swarm.models.flash.reading.drive_measurement import DriveProbe
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.record_reader import FlashIo

CONTEXT = 128
"""Tokens in the cache before the first one, as in the paper."""

Step = Callable[[torch.Tensor, DynamicCache], torch.Tensor]
"""A block: hidden states and the cache to hidden states."""


def plain(block: Any) -> Step:
    """A block whose weights are where they have to be."""
    return lambda hidden, cache: block(hidden, past_key_values=cache)


def new_cache(blocks: int, batch: int, dtype: torch.dtype, shape: OptShape = OPT) -> DynamicCache:
    """Keys and values of the tokens before the first one."""
    cache = DynamicCache()
    size = (batch, shape.heads, CONTEXT, shape.hidden // shape.heads)
    for number in range(blocks):
        cache.update(torch.randn(size).to(dtype), torch.randn(size).to(dtype), number)
    return cache


@torch.inference_mode()
def seconds_a_token(
    blocks: Sequence[Step], tokens: int, batch: int, dtype: torch.dtype, shape: OptShape = OPT
) -> float:
    """Time of one token of each sequence, the mean of some."""
    cache = new_cache(len(blocks), batch, dtype, shape)
    inputs = torch.randn(tokens, batch, 1, shape.hidden).to(dtype)
    began = time.perf_counter()
    for hidden in inputs:
        for block in blocks:
            hidden = block(hidden, cache)
    return (time.perf_counter() - began) / tokens


def drive_speed(path: Path, io: FlashIo, record_bytes: int) -> DriveSpeed:
    """How fast a packed file is read now."""
    with closing(open_reader(path, io)) as reader:
        return DriveProbe(reader).speed(record_bytes)
