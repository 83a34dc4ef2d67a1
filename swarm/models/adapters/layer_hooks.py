"""Adapters on frozen blocks: soft prompts and LoRA factors of many clients, in the same forward.

The family's modules stay as they are. Hooks on them look at what runs in their thread, add what each token's adapter
says, and do nothing where no adapter runs. They are put on a module when the first adapter that needs it is computed.

    linear modules    result + (inputs @ A.T) @ B.T, computed in the adapter's dtype (Hu et al. 2021)
    blocks            inputs of each row's first P positions + prompt (deep prompt tuning: Liu et al. 2021)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm.errors import AdapterRefused
from swarm.models.cutting.lora_targets import linear_size
from swarm.models.weights.frozen_linear import FrozenLinear
from swarm.protocol.adapters import BlockAdapterWeights, LoraFactors

AdapterWeights = Mapping[int, BlockAdapterWeights]
"""A client's adapter: what it adds to blocks, by their numbers in the whole model."""

NO_ADAPTER: AdapterWeights = {}

NAMED = 12
"""Modules that an error names at most."""


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Tokens of a forward that have the same adapter: one request's.

    Attributes:
        positions: of each token in its row, however the model counts; negative for padding.
    """

    parts: AdapterWeights
    positions: Sequence[int]


@dataclass(eq=False)
class AdapterBatch:
    """What runs in one forward.

    Args:
        shares: of all tokens, in order.
    """

    shares: Sequence[AdapterSegment]
    _indices: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _prompted: dict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor] | None] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the forward."""
        return sum(len(share.positions) for share in self.shares)

    def of(self, block: int) -> list[tuple[BlockAdapterWeights, tuple[int, ...]]]:
        """The different parts of a block, each with the numbers of the shares that have it."""
        found: dict[int, tuple[BlockAdapterWeights, tuple[int, ...]]] = {}
        for number, share in enumerate(self.shares):
            part = share.parts.get(block)
            if part is not None:
                _, before = found.get(id(part), (part, ()))
                found[id(part)] = part, (*before, number)
        return list(found.values())

    def index(self, numbers: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """Which tokens belong to these shares; None if all do."""
        if len(numbers) == len(self.shares):
            return None
        if numbers not in self._indices:
            tokens = [place for place, number in enumerate(self._owners()) if number in numbers]
            self._indices[numbers] = torch.tensor(tokens, dtype=torch.int64, device=device)
        return self._indices[numbers]

    def prompted(
        self, numbers: tuple[int, ...], length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which tokens of these shares get a prompt of so many positions, and which of its positions each gets."""
        key = numbers, length
        if key not in self._prompted:
            positions = [position for share in self.shares for position in share.positions]
            pairs = [
                (token, position)
                for token, (position, number) in enumerate(zip(positions, self._owners(), strict=True))
                if 0 <= position < length and number in numbers
            ]
            both = torch.tensor(pairs, device=device).unbind(1) if pairs else None
            self._prompted[key] = (both[0], both[1]) if both is not None else None
        return self._prompted[key]

    def _owners(self) -> list[int]:
        """The number of each token's share."""
        return [number for number, share in enumerate(self.shares) for _ in share.positions]


_running = threading.local()


def current() -> AdapterBatch | None:
    """What this thread runs."""
    return getattr(_running, "adapters", None)


class running:
    """`with running(adapters):` the layers that this thread runs have these adapters; None for none."""

    def __init__(self, adapters: AdapterBatch | None) -> None:
        self._adapters = adapters

    def __enter__(self) -> None:
        self._before = current()
        _running.adapters = self._adapters

    def __exit__(self, *error: object) -> None:
        _running.adapters = self._before


class AdaptedLayers:
    """The layers of a span, and where they can be added to. The parts of a span share them.

    Args:
        layers: of the span that was loaded.
        first: number of the first one in the whole model.
    """

    def __init__(self, layers: Iterable[nn.Module], first: int, hidden_size: int) -> None:
        self._layers = {first + number: layer for number, layer in enumerate(layers)}
        self._hidden_size = hidden_size
        self._hooked: set[tuple[int, str]] = set()

    def check(self, block: int, part: BlockAdapterWeights) -> None:
        """Raise `AdapterRefused` unless the part fits to the block. For any thread."""
        if block not in self._layers:
            raise AdapterRefused(f"an adapter is for block {block}, which this server does not hold")
        if part.prompt is not None and part.prompt.shape[1] != self._hidden_size:
            raise AdapterRefused(
                f"a prompt for block {block} is {part.prompt.shape[1]} wide, the model {self._hidden_size}"
            )
        modules = dict(self._layers[block].named_modules())
        if len({one.module for one in part.factors}) != len(part.factors):
            raise AdapterRefused(f"the adapter for block {block} names a module twice")
        for one in part.factors:
            _check_factors(block, one, modules)

    def fitted(self, parts: AdapterWeights) -> AdapterWeights:
        """The same parts, checked, where the layers are. Raises `AdapterRefused`."""
        for block, part in parts.items():
            self.check(block, part)
        device = next(next(iter(self._layers.values())).parameters()).device
        return {block: part.mapped(lambda tensor: tensor.to(device)) for block, part in parts.items()}

    def running(self, shares: Sequence[AdapterSegment]) -> running:
        """A context in which this thread runs the layers with these adapters, if there are any.

        The layers must not run elsewhere meanwhile.
        """
        for share in shares:
            self._hook(share.parts)
        return running(AdapterBatch(shares) if any(share.parts for share in shares) else None)

    def _hook(self, parts: AdapterWeights) -> None:
        for block, part in parts.items():
            if block not in self._layers:
                continue  # a part of the span is computed without the others' blocks
            if part.prompt is not None and (block, "") not in self._hooked:
                self._hook_layer(block)
            for one in part.factors:
                if (block, one.module) not in self._hooked:
                    self._hook_module(block, one.module)

    def _hook_layer(self, block: int) -> None:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            adapters = current()
            if adapters is None:
                return None
            if args:
                return (with_prompts(adapters, block, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": with_prompts(adapters, block, kwargs["hidden_states"])}

        self._layers[block].register_forward_pre_hook(add, with_kwargs=True)
        self._hooked.add((block, ""))

    def _hook_module(self, block: int, name: str) -> None:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
            adapters = current()
            if adapters is None:
                return None
            if not isinstance(output, torch.Tensor):  # a router, which is a linear module in name only
                raise AdapterRefused(f"{name} of block {block} gives more than a product; leave it out of the adapter")
            inputs = args[0] if args else next(iter(kwargs.values()))
            return with_factors(adapters, block, name, inputs, output)

        self._layers[block].get_submodule(name).register_forward_hook(add, with_kwargs=True)
        self._hooked.add((block, name))


def with_prompts(adapters: AdapterBatch, block: int, hidden: torch.Tensor) -> torch.Tensor:
    """A block's inputs `[..., hidden]` and the prompts of its adapters."""
    for part, numbers in adapters.of(block):
        places = adapters.prompted(numbers, len(part.prompt), hidden.device) if part.prompt is not None else None
        if places is not None:
            assert part.prompt is not None
            tokens, positions = places
            flat = hidden.flatten(0, -2).index_add(0, tokens, part.prompt.to(hidden.dtype)[positions])
            hidden = flat.view(hidden.shape)
    return hidden


def with_factors(
    adapters: AdapterBatch, block: int, module: str, inputs: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """A module's result `[..., outputs]` for `[..., inputs]`, and what its adapters add.

    Raises `AdapterRefused` where the module sees other tokens than the block, as an expert does, and several adapters
    run: it works if each runs alone.
    """
    for part, numbers in adapters.of(block):
        factors = next((one for one in part.factors if one.module == module), None)
        if factors is None:
            continue
        index = adapters.index(numbers, inputs.device)
        if index is None:
            output = output + _low_rank(factors, inputs).to(output.dtype)
            continue
        flat = inputs.flatten(0, -2)
        if not len(inputs) == len(flat) == adapters.tokens or ".experts." in module:
            raise AdapterRefused(f"{module} of block {block} is not computed token by token")
        added = _low_rank(factors, flat.index_select(0, index)).to(output.dtype)
        output = output.flatten(0, -2).index_add(0, index, added).view(output.shape)
    return output


def _low_rank(factors: LoraFactors, inputs: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.linear(inputs.to(factors.down.dtype), factors.down), factors.up)


def _check_factors(block: int, factors: LoraFactors, modules: Mapping[str, nn.Module]) -> None:
    name = factors.module
    expected = _sizes(modules[name]) if name in modules else None
    if expected is None:
        known = [other for other, module in modules.items() if _sizes(module) is not None]
        more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
        raise AdapterRefused(
            f"block {block} has no linear module {name[:80]!r}; it has {', '.join(known[:NAMED])}{more}"
        )
    down, up = tuple(factors.down.shape), tuple(factors.up.shape)
    if (down[1], up[0]) != expected or down[0] != up[1]:
        raise AdapterRefused(
            f"factors for {name} of block {block} are A {down} and B {up}; it takes A [rank, {expected[0]}] and "
            f"B [{expected[1]}, rank]"
        )


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear module, in whatever form its weight is held; None for any other."""
    return (module.in_features, module.out_features) if isinstance(module, FrozenLinear) else linear_size(module)
