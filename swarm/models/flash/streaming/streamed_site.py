"""Which tensors of a block are streamed: all matrices. What is small stays in memory."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from swarm.models.flash.plans.block_plan import BlockPlan, RecordKind

MIN_DIMENSIONS = 2
"""Of a tensor that is streamed. Vectors (norms, biases) stay in memory: they are a thousandth of a block."""


def plan_streamed(block: nn.Module) -> BlockPlan | None:
    """The plan that streams a block whole: one record with the matrices of all its innermost modules.

    Stacked experts count as matrices. A module that holds buffers stays in memory, because only its parameters could
    be put back, and so does a matrix in another dtype than the others (some routers compute in fp32).

    Args:
        block: in the dtypes in which it will compute; it may be on the meta device.

    Returns:
        The plan; None if the block has no such matrix.
    """
    owners = {path: module for path, module in block.named_modules() if path and _is_innermost(module)}
    matrices = {path: _matrices(module) for path, module in owners.items()}
    dtype = _prevailing_dtype([tensor for found in matrices.values() for tensor in found.values()])
    axes: dict[str, int | None] = {}
    modules: dict[str, str] = {}
    resident: list[str] = []
    for path, found in matrices.items():
        streamed = {name for name, tensor in found.items() if tensor.dtype == dtype}
        if streamed:
            modules[path] = path
            axes.update({f"{path}.{name}": None for name in found if name in streamed})
            others = (name for name, _ in owners[path].named_parameters() if name not in streamed)
            resident.extend(f"{path}.{name}" for name in others)
    return BlockPlan(RecordKind.BLOCK, modules, axes, tuple(resident)) if axes else None


def _is_innermost(module: nn.Module) -> bool:
    """Whether a module has no buffers, and no parameters but its own."""
    children_hold_parameters = any(next(child.parameters(), None) is not None for child in module.children())
    return not children_hold_parameters and next(module.buffers(), None) is None


def _matrices(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.named_parameters() if tensor.ndim >= MIN_DIMENSIONS}


def _prevailing_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """The dtype in which most of the values are; None if there are none."""
    values: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        values[tensor.dtype] += tensor.numel()
    return values.most_common(1)[0][0] if values else None
