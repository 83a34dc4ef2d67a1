"""LoRA with random factors."""

from __future__ import annotations

import torch

from swarm.models.adapters.adapter_batch import AdapterWeights
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.execution.span_model import SpanModel


def random_adapter(model: SpanModel, rank: int, seed: int = 0) -> AdapterWeights:
    """LoRA on the queries and values of every block, on the processor: `AdaptedLayers.prepare` moves it."""
    noise = torch.Generator().manual_seed(seed)

    def factors(name: str, block: torch.nn.Module) -> LoraFactors:
        linear = block.get_submodule(name)
        down = torch.randn(rank, linear.in_features, generator=noise) / linear.in_features**0.5
        up = 0.3 * torch.randn(linear.out_features, rank, generator=noise) / rank**0.5
        return LoraFactors(name, down.to(model.dtype), up.to(model.dtype))

    names = ("self_attn.q_proj", "self_attn.v_proj")
    return {
        number: BlockAdapterWeights(None, tuple(factors(name, block) for name in names))
        for number, block in zip(range(model.span.start, model.span.end), model.layers, strict=True)
    }
