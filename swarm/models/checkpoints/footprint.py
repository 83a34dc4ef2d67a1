"""How much memory a model's blocks take, computed on the meta device: no weights are needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from swarm.errors import CheckpointError, InvalidOption
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.packed_weights import held_bytes, is_bitsandbytes, is_integers, quantization_of
from swarm.models.cutting import cut_layers, families
from swarm.models.cutting.model_inspection import ModelStructure
from swarm.models.weights.quantization import NONE, PACKED, quantizable, quantized_bytes

STATE_TOKENS = 2048
"""Tokens of the cache for which there is memory for the states of one sequence."""

STATE_VALUE_BYTES = 4
"""States are mostly float32, whatever the model's dtype is."""


@dataclass(frozen=True)
class MemoryFootprint:
    """Memory that a model's blocks and their attention caches take.

    Attributes:
        block_bytes: bytes of each block's weights.
        cache_bytes: bytes that one position takes in the attention cache of each block. A state, which a sequence has
            however long it is, is counted as `STATE_TOKENS` positions.
    """

    block_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one position takes in any block at most."""
        return max(self.cache_bytes)

    def largest_block_bytes(self, cache_tokens: int) -> int:
        """Bytes of the block that takes the most with a full cache."""
        return max(self.span_bytes(block, block + 1, cache_tokens) for block in range(len(self.block_bytes)))

    def span_bytes(self, start: int, end: int, cache_tokens: int) -> int:
        """Bytes of blocks [start, end) with a full cache."""
        return sum(self.block_bytes[start:end]) + cache_tokens * sum(self.cache_bytes[start:end])


def memory_footprint(checkpoint: Checkpoint, dtype: torch.dtype, quant: str = NONE) -> MemoryFootprint:
    """The memory that a checkpoint's blocks take when computing in `dtype`. No weights are read.

    Args:
        quant: quantization of the weights, see `swarm.models.weights.quantization`.

    Raises `InvalidOption` if they should be held as they are packed, but are not.
    """
    structure = checkpoint.structure
    if quant == PACKED:
        found = packed_bytes(checkpoint, dtype)
        if found is None:
            raise InvalidOption(
                f"--quant packed: nothing here says that the weights of {checkpoint.name} are packed; use auto or none"
            )
        return MemoryFootprint(found, cache_bytes(structure, dtype))
    block_bytes = [parameters * dtype.itemsize for parameters in structure.block_parameters]
    if quant != NONE:
        for block, linears in enumerate(_linears(checkpoint)):
            block_bytes[block] -= sum(_saved_bytes(linear, dtype, quant) for linear in linears)
    return MemoryFootprint(tuple(block_bytes), cache_bytes(structure, dtype))


def packed_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Bytes of each block whose packed weights stay packed; None if none are, or nothing says how they are stored."""
    try:
        stored = checkpoint.stored_tensors
    except CheckpointError:
        return None
    is_packed, found = False, [0] * checkpoint.blocks
    for name, (stored_dtype, size) in stored.items():
        if (place := checkpoint.locate(name)) is not None:
            is_packed |= is_integers(stored_dtype) and not is_bitsandbytes(quantization_of(checkpoint.config))
            found[place[0]] += held_bytes(name, stored_dtype, size, dtype.itemsize)
    return tuple(found) if is_packed else None


def is_faster_packed(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights are multiplied by torch's kernel for 4 bits (`swarm.models.weights.packed`).

    Raises `CheckpointError` if nothing says how they are stored.
    """
    dtypes = {one for one, _ in checkpoint.stored_tensors.values()}
    return bool({"I32", "U32"} & dtypes) and device.type == "cpu" and dtype is torch.bfloat16


def cache_bytes(structure: ModelStructure, dtype: torch.dtype) -> tuple[int, ...]:
    """See `MemoryFootprint.cache_bytes`."""
    states = state_bytes(structure)
    return tuple(
        values * dtype.itemsize + -(-state // STATE_TOKENS)
        for values, state in zip(structure.cached_values, states, strict=True)
    )


def state_bytes(structure: ModelStructure) -> tuple[int, ...]:
    """Bytes that each block keeps of a sequence, however long it is: the state as it is, as a step leaves it, and that
    of the kept point (`swarm.models.attention.sequence_states`)."""
    return tuple(3 * STATE_VALUE_BYTES * values for values in structure.state_values)


def _linears(checkpoint: Checkpoint) -> Iterator[list[nn.Module]]:
    """The plain linear layers of each block, on the meta device."""
    config = copy.deepcopy(checkpoint.config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    path, _, _ = cut_layers.find_layers(model, checkpoint.blocks)
    for layer in model.get_submodule(path).children():
        yield [module for module in layer.modules() if type(module) is nn.Linear]


def _saved_bytes(linear: nn.Module, dtype: torch.dtype, quant: str) -> int:
    if not quantizable(linear, quant):
        return 0
    assert isinstance(linear, nn.Linear)
    full = linear.weight.numel() * dtype.itemsize
    return full - quantized_bytes(linear.out_features, linear.in_features, quant)
