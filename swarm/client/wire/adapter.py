"""What a client adds to the frozen blocks of the swarm, as the rest of the client sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from swarm.data_structures import Span
from swarm.protocol.adapter_encoding import BlockAdapterWeights, LoraFactors


class Adapter(Protocol):
    """Soft prompts and LoRA factors, by block. Its tensors may require gradients and be the result of other ones."""

    def part(self, block: int) -> BlockAdapterWeights | None:
        """What is added to a block of the whole model, as it is now; None for nothing."""


def adapter_parts(adapter: Adapter | None, span: Span) -> dict[int, BlockAdapterWeights]:
    """What is added to the blocks of `span` now, by block; nothing for blocks to which nothing is added."""
    if adapter is None:
        return {}
    parts = {block: adapter.part(block) for block in range(span.start, span.end)}
    return {block: part for block, part in parts.items() if part is not None and part.tensors}


def detach_parts(parts: Mapping[int, BlockAdapterWeights]) -> dict[int, BlockAdapterWeights]:
    """The parts as they are now, whatever becomes of their tensors."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    return {
        block: BlockAdapterWeights(
            copy(part.prompt) if part.prompt is not None else None,
            tuple(LoraFactors(one.module, copy(one.down), copy(one.up)) for one in part.factors),
        )
        for block, part in parts.items()
    }
