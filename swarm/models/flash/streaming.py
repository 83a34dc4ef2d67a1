"""Blocks read in order into two buffers: while one block computes, the next one is on its way. Exact.

A block's own modules compute, as they do in a span that is in memory; only their matrices are views into a buffer. So
results are the same, bit for bit, as long as the same kernels run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.models.flash.block_plan import BlockPlan, FlashBlock, RecordKind
from swarm.models.flash.memory_shares import BUFFERS, choose_resident
from swarm.models.flash.records import PendingRead, RecordBuffer, allocate_aligned

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


THE_RECORD = np.zeros(1, dtype=np.int64)
"""Number of a block's only record, and of a buffer's only slot."""


class BlockStream:
    """The blocks of a span, of which some stay in memory and the others are read for each forward.

    Blocks run in one thread at a time. Gradients are exact if each block is computed again before its own backward, as
    with `torch.utils.checkpoint`: a block's matrices are only there until the next blocks run.

    Attributes:
        memory_bytes: memory that matrices take, buffers included.
        streamed: number of blocks that are read for each forward.
    """

    def __init__(self, blocks: Sequence[FlashBlock], budget: int) -> None:
        """Put the modules back, read the blocks that stay, and begin to read the first of the others.

        Args:
            blocks: planned by `plan_streamed`, in the order of the span.
            budget: bytes for matrices.

        Raises:
            NotEnoughMemory: the budget is too small, see `residency`.
            DriveFailed: the blocks that stay cannot be read.
        """
        self._stores = [one.store for one in blocks]
        stay = choose_resident([store.layout.stride for store in self._stores], budget)
        for one in blocks:
            _put_back(one)
        kept = [RecordBuffer(one.store.layout, 1) for one, stays in zip(blocks, stay, strict=True) if stays]
        _load_resident([one for one, stays in zip(blocks, stay, strict=True) if stays], kept)
        moving = [one for one, stays in zip(blocks, stay, strict=True) if not stays]
        largest = max((one.store.layout.stride for one in moving), default=0)
        self._slots = [_Slot(allocate_aligned(largest)) for _ in range(BUFFERS if moving else 0)]
        self._moving = [_MovingBlock(one, self._slots) for one in moving]
        self.memory_bytes = sum(buffer.nbytes for buffer in kept) + len(self._slots) * largest
        self.streamed = len(moving)
        self._last = -1
        for number, one in enumerate(moving):
            self._moving[number].bind(self._slots[0])  # so that no parameter is on the meta device
            one.block.forward = partial(self._forward, number, one.block.forward)  # type: ignore[method-assign]
        if self._moving:
            self._begin(self._slots[0], 0)

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward. No hook would be called where a forward is computed again for its backward."""
        self._enter(number)
        return forward(*args, **kwargs)

    def _enter(self, number: int) -> None:
        """A block is about to run: wait until its matrices are there, and begin to read those of the next."""
        slot = next((one for one in self._slots if one.block == number), None)
        if slot is None:
            slot = self._slot_beside(self._last)
            self._begin(slot, number)
        slot.finish()
        self._moving[number].bind(slot)
        backward = number == self._last - 1
        self._last = number
        following = (number - 1 if backward else number + 1) % self.streamed
        if all(one.block != following for one in self._slots):
            self._begin(self._slot_beside(number), following)

    def _slot_beside(self, number: int) -> _Slot:
        """A slot in which another block lies than this one."""
        return next(one for one in self._slots if one.block != number)

    def _begin(self, slot: _Slot, number: int) -> None:
        slot.finish()
        slot.block = None
        slot.pending = self._moving[number].read(slot)
        slot.block = number


class _Slot:
    """Memory for one block.

    Attributes:
        block: the number of the streamed block that lies here or is on its way; None for none.
        pending: the read that brings it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.block: int | None = None
        self.pending: PendingRead | None = None

    def finish(self) -> None:
        """Wait until the block has arrived. If it cannot be read, the slot is empty. Raises `DriveFailed`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            block, self.block = self.block, None
            pending.wait()
            self.block = block


class _MovingBlock:
    """A block whose matrices lie in one buffer or another."""

    def __init__(self, one: FlashBlock, slots: Iterable[_Slot]) -> None:
        self._store = one.store
        self._buffers = {slot: RecordBuffer(one.store.layout, 1, slot.memory) for slot in slots}
        self._parameters = {slot: _parameters(one, buffer) for slot, buffer in self._buffers.items()}

    def read(self, slot: _Slot) -> PendingRead:
        return self._store.read(THE_RECORD, self._buffers[slot], THE_RECORD)

    def bind(self, slot: _Slot) -> None:
        """Let the block's modules compute with what lies in `slot`."""
        for module, name, parameter in self._parameters[slot]:
            module._parameters[name] = parameter


def _parameters(one: FlashBlock, buffer: RecordBuffer) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The block's matrices as they lie in a buffer, and where each belongs."""
    found = []
    for tensor in one.plan.axes:
        path, _, name = tensor.rpartition(".")
        view = nn.Parameter(buffer.field(tensor)[0], requires_grad=False)
        found.append((one.block.get_submodule(path), name, view))
    return found


def _put_back(one: FlashBlock) -> None:
    """Put the modules that were taken out back where they were, with those parameters that stay in memory."""
    for path, module in one.taken.items():
        one.block.set_submodule(path, module)
    for tensor in one.plan.resident:
        path, _, name = tensor.rpartition(".")
        one.block.get_submodule(path)._parameters[name] = nn.Parameter(one.resident[tensor], requires_grad=False)


def _load_resident(blocks: Sequence[FlashBlock], buffers: Sequence[RecordBuffer]) -> None:
    """Read blocks that stay in memory, all at once."""
    reads = [one.store.read(THE_RECORD, buffer, THE_RECORD) for one, buffer in zip(blocks, buffers, strict=True)]
    for read in reads:
        read.wait()
    for one, buffer in zip(blocks, buffers, strict=True):
        for module, name, parameter in _parameters(one, buffer):
            module._parameters[name] = parameter
