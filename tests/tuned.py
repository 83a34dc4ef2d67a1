"""What adapters do to a plain transformers model, written out by hand: the truth that tests compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors

ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "out_proj",
    "query_key_value",
    "attention.dense",
    "attn.c_attn",
    "attn.c_proj",
)
"""Ends of the names of attention's linear modules."""


class ListedAdapter:
    """Parts by block."""

    def __init__(self, parts: dict[int, BlockAdapterWeights]) -> None:
        self.parts = parts

    def part(self, block: int) -> BlockAdapterWeights | None:
        return self.parts.get(block)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for block in sorted(self.parts) for tensor in self.parts[block].tensors]


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers of a plain model."""
    blocks = model.config.num_hidden_layers
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == blocks)


def linear_modules(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Attention's linear modules, with inputs and outputs."""
    found = {}
    for name, module in layer.named_modules():
        if name.endswith(ATTENTION):
            size = tuple(module.weight.shape)
            found[name] = size if isinstance(module, Conv1D) else size[::-1]
    assert found, f"{type(layer).__name__} has no attention that is known"
    return found


def random_adapter(
    model: Any, rank: int = 3, prompt: int = 2, blocks: Sequence[int] | None = None, seed: int = 0
) -> ListedAdapter:
    """Factors for all of attention and a prompt, for these blocks (None: all); leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).requires_grad_()

    parts = {}
    for block, layer in enumerate(layers_of(model)):
        if blocks is not None and block not in blocks:
            continue
        factors = tuple(
            LoraFactors(name, leaf(rank, inputs), leaf(outputs, rank))
            for name, (inputs, outputs) in (linear_modules(layer) if rank else {}).items()
        )
        parts[block] = BlockAdapterWeights(leaf(prompt, model.config.hidden_size) if prompt else None, factors)
    return ListedAdapter(parts)


@contextmanager
def adapted(model: Any, adapter: ListedAdapter) -> Iterator[None]:
    """The plain model with the adapter, for rows without padding on the left."""
    layers = layers_of(model)
    handles = []
    for block, part in adapter.parts.items():
        if part.prompt is not None:
            handles.append(layers[block].register_forward_pre_hook(_prompt_hook(part.prompt), with_kwargs=True))
        for factors in part.factors:
            handles.append(layers[block].get_submodule(factors.module).register_forward_hook(_factors_hook(factors)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _prompt_hook(prompt: torch.Tensor) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        added = torch.zeros_like(hidden)
        length = min(len(prompt), hidden.shape[1])
        added[:, :length] = prompt[:length].to(hidden.dtype)
        if args:
            return (hidden + added, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden + added}

    return before


def _factors_hook(factors: LoraFactors) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + (args[0] @ factors.down.T) @ factors.up.T

    return after
