"""The weights of one block's adapter: a soft prompt, and LoRA factors of some of its linear modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """LoRA factors of one module: `up @ down` is added to its weight.

    Attributes:
        module: the module's path inside the block, such as "self_attn.q_proj".
        down: A, `[rank, inputs]`.
        up: B, `[outputs, rank]`, already multiplied by the adapter's scaling.
    """

    module: str
    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockAdapterWeights:
    """The adapter weights of one block.

    Attributes:
        prompt: soft prompt `[positions, hidden_size]`, added to the inputs of each sequence's first positions; or None.
        factors: LoRA factors, at most once for each module.
    """

    prompt: torch.Tensor | None = None
    factors: tuple[LoraFactors, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order in which they are encoded."""
        prompt = () if self.prompt is None else (self.prompt,)
        return (*prompt, *(tensor for one in self.factors for tensor in (one.down, one.up)))

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockAdapterWeights:
        """A copy with `change` applied to every tensor; `change` must keep the shapes."""
        factors = tuple(LoraFactors(one.module, change(one.down), change(one.up)) for one in self.factors)
        return BlockAdapterWeights(change(self.prompt) if self.prompt is not None else None, factors)
