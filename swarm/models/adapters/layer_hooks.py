"""Hooks on frozen layers that add soft prompts and LoRA: adapters of many clients, in the same forward.

The family's modules stay as they are. A hook looks at the adapters that are active in its thread and adds what each
token's adapter asks for; where no adapter is active it does nothing. A module gets its hook when the first adapter
that changes it is computed.

    linear modules    result + (inputs @ A.T) @ B.T, computed in the adapter's dtype (Hu et al. 2021)
    blocks            inputs of the first P positions of each sequence + prompt (deep prompt tuning: Liu et al. 2021)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm.errors import AdapterRefused
from swarm.models.adapters.adapter_batch import (
    ActiveAdapters,
    AdapterBatch,
    AdapterSegment,
    AdapterWeights,
    active_adapters,
)
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.cutting.model_inspection import linear_size
from swarm.models.weights.frozen_linear import FrozenLinear

MAX_MODULES_IN_ERROR = 12
"""Module names that an error message lists at most."""


class AdaptedLayers:
    """The layers of a span, to which adapters can be added. All parts of a span share them.

    Args:
        layers: the layers of the loaded span.
        first: number of the first layer in the whole model.
    """

    def __init__(self, layers: Iterable[nn.Module], first: int, hidden_size: int) -> None:
        self._layers = {first + number: layer for number, layer in enumerate(layers)}
        self._hidden_size = hidden_size
        self._hooked: set[tuple[int, str]] = set()

    def validate(self, block: int, weights: BlockAdapterWeights) -> None:
        """Raise `AdapterRefused` unless the adapter weights fit the block. Any thread may call this."""
        if block not in self._layers:
            raise AdapterRefused(f"the adapter is for block {block}, which this server does not hold")
        if weights.prompt is not None and weights.prompt.shape[1] != self._hidden_size:
            raise AdapterRefused(
                f"the soft prompt for block {block} is {weights.prompt.shape[1]} values wide, but the model's hidden "
                f"size is {self._hidden_size}"
            )
        modules = dict(self._layers[block].named_modules())
        if len({one.module for one in weights.factors}) != len(weights.factors):
            raise AdapterRefused(f"the adapter for block {block} names the same module twice")
        for one in weights.factors:
            _validate_factors(block, one, modules)

    def prepare(self, adapter: AdapterWeights) -> AdapterWeights:
        """Validate an adapter and copy it to the layers' device. Raises `AdapterRefused` if it does not fit."""
        for block, weights in adapter.items():
            self.validate(block, weights)
        device = next(next(iter(self._layers.values())).parameters()).device
        return {block: weights.map_tensors(lambda tensor: tensor.to(device)) for block, weights in adapter.items()}

    def activate(self, segments: Sequence[AdapterSegment]) -> ActiveAdapters:
        """A context in which the layers that this thread runs add the segments' adapters, if there are any.

        No other thread may run the layers meanwhile.
        """
        for segment in segments:
            self._add_hooks(segment.weights)
        return ActiveAdapters(AdapterBatch(segments) if any(segment.weights for segment in segments) else None)

    def _add_hooks(self, adapter: AdapterWeights) -> None:
        for block, weights in adapter.items():
            if block not in self._layers:
                continue  # a part of the span is computed without the blocks of the others
            if weights.prompt is not None and (block, "") not in self._hooked:
                self._hook_layer(block)
            for one in weights.factors:
                if (block, one.module) not in self._hooked:
                    self._hook_module(block, one.module)

    def _hook_layer(self, block: int) -> None:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            adapters = active_adapters()
            if adapters is None:
                return None
            if args:
                return (add_prompts(adapters, block, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": add_prompts(adapters, block, kwargs["hidden_states"])}

        self._layers[block].register_forward_pre_hook(add, with_kwargs=True)
        self._hooked.add((block, ""))

    def _hook_module(self, block: int, name: str) -> None:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
            adapters = active_adapters()
            if adapters is None:
                return None
            if not isinstance(output, torch.Tensor):  # a router, which is a linear module in name only
                raise AdapterRefused(
                    f"{name} of block {block} returns more than a matrix product, so LoRA cannot be added to it; "
                    "leave it out of the adapter"
                )
            inputs = args[0] if args else next(iter(kwargs.values()))
            return add_lora(adapters, block, name, inputs, output)

        self._layers[block].get_submodule(name).register_forward_hook(add, with_kwargs=True)
        self._hooked.add((block, name))


def add_prompts(adapters: AdapterBatch, block: int, hidden: torch.Tensor) -> torch.Tensor:
    """A block's inputs `[..., hidden]`, with the soft prompts of the batch's adapters added."""
    for weights, numbers in adapters.weights_of(block):
        if weights.prompt is None:
            continue
        index = adapters.prompt_index(numbers, len(weights.prompt), hidden.device)
        if index is not None:
            tokens, positions = index
            flat = hidden.flatten(0, -2).index_add(0, tokens, weights.prompt.to(hidden.dtype)[positions])
            hidden = flat.view(hidden.shape)
    return hidden


def add_lora(
    adapters: AdapterBatch, block: int, module: str, inputs: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """A module's result `[..., outputs]` for `[..., inputs]`, with the LoRA products of the batch's adapters added.

    Raises:
        AdapterRefused: several adapters are active, and the module does not see the block's tokens one by one (as an
            expert does not). Each of the adapters works when it runs alone.
    """
    for weights, numbers in adapters.weights_of(block):
        factors = next((one for one in weights.factors if one.module == module), None)
        if factors is None:
            continue
        index = adapters.token_index(numbers, inputs.device)
        if index is None:
            output = output + _lora_product(factors, inputs).to(output.dtype)
            continue
        flat = inputs.flatten(0, -2)
        if not len(inputs) == len(flat) == adapters.tokens or ".experts." in module:
            raise AdapterRefused(f"{module} of block {block} is not computed token by token")
        added = _lora_product(factors, flat.index_select(0, index)).to(output.dtype)
        output = output.flatten(0, -2).index_add(0, index, added).view(output.shape)
    return output


def _lora_product(factors: LoraFactors, inputs: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.linear(inputs.to(factors.down.dtype), factors.down), factors.up)


def _validate_factors(block: int, factors: LoraFactors, modules: Mapping[str, nn.Module]) -> None:
    name = factors.module
    expected = _linear_size(modules[name]) if name in modules else None
    if expected is None:
        known = [other for other, module in modules.items() if _linear_size(module) is not None]
        more = f" and {len(known) - MAX_MODULES_IN_ERROR} more" if len(known) > MAX_MODULES_IN_ERROR else ""
        raise AdapterRefused(
            f"block {block} has no linear module {name[:80]!r}; it has {', '.join(known[:MAX_MODULES_IN_ERROR])}{more}"
        )
    down, up = tuple(factors.down.shape), tuple(factors.up.shape)
    if (down[1], up[0]) != expected or down[0] != up[1]:
        raise AdapterRefused(
            f"the LoRA factors for {name} of block {block} are A {down} and B {up}; the module needs "
            f"A [rank, {expected[0]}] and B [{expected[1]}, rank]"
        )


def _linear_size(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module, in whatever form its weight is held; None for any other module."""
    return (module.in_features, module.out_features) if isinstance(module, FrozenLinear) else linear_size(module)
