"""What a client adds to the swarm's frozen blocks, as the rest of the client sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from swarm.data_structures import Span
from swarm.models.adapters.block_adapter import BlockAdapterWeights


class Adapter(Protocol):
    """Soft prompts and LoRA factors by block. Its tensors may require gradients and depend on other tensors."""

    def part(self, block: int) -> BlockAdapterWeights | None:
        """What is added to one block of the model, with current values; None if nothing is added."""


def adapter_parts(adapter: Adapter | None, span: Span) -> dict[int, BlockAdapterWeights]:
    """The adapter's parts for the blocks of `span`, with current values; blocks without a part are missing."""
    if adapter is None:
        return {}
    parts = {block: adapter.part(block) for block in range(span.start, span.end)}
    return {block: part for block, part in parts.items() if part is not None and part.tensors}


def detach_parts(parts: Mapping[int, BlockAdapterWeights]) -> dict[int, BlockAdapterWeights]:
    """Copies of the parts that later training does not change."""
    return {block: part.map_tensors(lambda tensor: tensor.detach().clone()) for block, part in parts.items()}
