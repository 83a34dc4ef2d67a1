"""Loading one block: its tensors, in the family's own model cut to this block."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from swarm.errors import CheckpointError
from swarm.models.checkpoints.block_digest import block_digest
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.partial_loading import load_partial_model
from swarm.models.checkpoints.weight_places import Hold
from swarm.models.cutting import cut_layers, families


def load_block(checkpoint: Checkpoint, block: int, dtype: torch.dtype, hold: Hold | None = None) -> tuple[Any, str]:
    """The model cut to one block, on the CPU, with the config of the whole model; and the block's digest.

    Args:
        hold: makes the layers for packed weights that stay packed; None to unpack all.

    Raises `CheckpointError` if weights are missing, unreadable or of the wrong shape.
    """
    tensors = read_block(checkpoint, block, dtype)
    of_files = None if checkpoint.gguf is None else checkpoint.block_digests(block, block + 1)
    digest = block_digest(tensors) if of_files is None else of_files[0]
    return fill_block(checkpoint, block, dtype, tensors, hold=hold), digest


def read_block(checkpoint: Checkpoint, block: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The block's tensors as stored in the checkpoint, by their names inside the block. Raises `CheckpointError`.

    They are copied: safetensors maps the file into memory, and one small tensor would keep the whole mapping alive.
    """
    tensors: dict[str, torch.Tensor] = {}

    def is_in_block(name: str) -> bool:
        place = checkpoint.locate(name)
        return place is not None and place[0] == block

    for name, tensor in checkpoint.read_tensors(is_in_block, dtype):
        place = checkpoint.locate(name)
        assert place is not None
        if place[1] in tensors:
            raise CheckpointError(f"{checkpoint.source} holds {place[1]} of block {block} twice, as {name} too")
        tensors[place[1]] = tensor.clone()
    return tensors


def fill_block(
    checkpoint: Checkpoint,
    block: int,
    dtype: torch.dtype,
    tensors: dict[str, torch.Tensor],
    *,
    change: Callable[[nn.Module], object] = lambda layer: None,
    converted: bool = False,
    hold: Hold | None = None,
) -> Any:
    """The model cut to one block and filled with `tensors`, on the CPU, with the config of the whole model.

    Args:
        tensors: by their names inside the block. They are taken out, so that they are free once unpacked or fused.
        change: changes the block while it is on the meta device, before it is filled.
        converted: whether the tensors come from a loaded model, and so have its names and no quantization.
        hold: makes the layers for packed weights that stay packed; None to unpack all.

    Raises:
        CheckpointError: tensors are missing or do not fit the model.
    """
    config = copy.deepcopy(checkpoint.config)

    def cut(model: nn.Module) -> None:
        _, owner, name = cut_layers.find_layers(model, checkpoint.blocks)
        kept = getattr(owner, name)[block : block + 1]
        setattr(owner, name, kept)
        cut_layers.drop_weights(owner, keep=(name,))
        cut_layers.renumber_layers(kept)
        change(kept[0])

    layers = checkpoint.structure.layers_path
    prefix = f"{layers}.0."
    named = {prefix + name: tensors.pop(name) for name in list(tensors)}
    try:
        family = families.base_class(config)
        return load_partial_model(family, config, cut, named, dtype, converted=converted, hold=hold)
    except CheckpointError as error:  # it takes the block for the first one
        raise CheckpointError(
            f"block {block} cannot be loaded: {error}".replace(prefix, f"{layers}.{block}.")
        ) from error


def return_freed_memory() -> None:
    """Return the memory of freed tensors from the allocator to the system, if the C library is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
