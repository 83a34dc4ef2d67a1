"""How much memory a model's blocks take, read off the model built on the meta device: no weights are needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting import families, surgery
from swarm.models.weights.quantization import NONE, quantizable, quantized_bytes


@dataclass(frozen=True)
class MemoryFootprint:
    """Attributes:
    weights: bytes that the weights of each block take.
    cache_per_token: bytes that one position takes in the attention cache of one block.
    """

    weights: tuple[int, ...]
    cache_per_token: int

    def of(self, start: int, end: int, cache_tokens: int) -> int:
        """Bytes for blocks [start, end) with a full cache."""
        return sum(self.weights[start:end]) + (end - start) * cache_tokens * self.cache_per_token


def memory_footprint(checkpoint: Checkpoint, dtype: torch.dtype, quant: str = NONE) -> MemoryFootprint:
    """Bytes of each block's weights and of one cached position, computing in `dtype`. No weights are read.

    Args:
        quant: form of the weights, see `swarm.models.weights.quantization`.
    """
    structure = checkpoint.structure
    weights = [parameters * dtype.itemsize for parameters in structure.parameters]
    if quant != NONE:
        for block, linears in enumerate(_linears(checkpoint)):
            weights[block] -= sum(_saved(linear, dtype, quant) for linear in linears)
    return MemoryFootprint(tuple(weights), structure.cached_values * dtype.itemsize)


def _linears(checkpoint: Checkpoint) -> Iterator[list[nn.Module]]:
    """The plain linear layers of each block, without data."""
    config = copy.deepcopy(checkpoint.config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    path, _, _ = surgery.find_layers(model, checkpoint.blocks)
    for layer in model.get_submodule(path).children():
        yield [module for module in layer.modules() if type(module) is nn.Linear]


def _saved(linear: nn.Module, dtype: torch.dtype, quant: str) -> int:
    if not quantizable(linear, quant):
        return 0
    assert isinstance(linear, nn.Linear)
    full = linear.weight.numel() * dtype.itemsize
    return full - quantized_bytes(linear.out_features, linear.in_features, quant)
