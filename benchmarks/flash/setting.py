"""What the decoding benchmark compares, and how much memory each side gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.flash.files import OPT
from benchmarks.flash.matrix import NothingStore
from benchmarks.flash.opt import RANK, empty_block, sparse_blocks
from benchmarks.flash.planted import PlantedNeurons
from swarm.models.flash.neurons.sparse_feed_forward import SparseOptions

TINY = replace(OPT, hidden=64, heads=1)
"""As many neurons, and next to no weights."""

TINY_TOKENS = 64
BATCHES = (2, 4, 8)
"""Sequences that are computed together."""


def batch_name(sequences: int) -> str:
    """Of the row."""
    return f"flash, {sequences} sequences"


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
        memory: bytes for the weights of the blocks on flash, attention and predictors included.
    """

    folder: Path
    dtype: torch.dtype
    layers: int
    planted: PlantedNeurons
    memory: int


def half_the_memory(dtype: torch.dtype, layers: int) -> int:
    """Half of what the blocks take."""
    return layers * OPT.whole(dtype).stride // 2


def neuron_slots(setting: Setting) -> int:
    """Neurons of a block that memory has room for beside attention and predictor."""
    return slots_for(setting.memory, setting.layers, setting.dtype)


def slots_for(memory: int, layers: int, dtype: torch.dtype) -> int:
    """Neurons of one of so many blocks that `memory` bytes have room for beside attention and predictors."""
    attention = sum(math.prod(size) for size in OPT.attention.values()) * dtype.itemsize
    left = memory // layers - attention - predictor_bytes(dtype)
    return left // OPT.bundled(dtype).stride


def predictor_bytes(dtype: torch.dtype) -> int:
    return RANK * (OPT.hidden + OPT.neurons) * dtype.itemsize


def tiny_blocks(dtype: torch.dtype, planted: PlantedNeurons) -> list[nn.Module]:
    """One sparse block with next to no weights, for `TINY_TOKENS` tokens."""
    block = empty_block(0, dtype, planted.active, TINY)
    for name, size in TINY.attention.items():
        path, _, own = name.rpartition(".")
        block.get_submodule(path)._parameters[own] = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
    options = SparseOptions(round(planted.needed(5) * TINY.neurons))
    sparse = sparse_blocks([block], [planted.draw(TINY.neurons, 0)], [NothingStore(TINY.bundled(dtype))], options, TINY)
    sparse.draw(TINY_TOKENS)
    return sparse.blocks
