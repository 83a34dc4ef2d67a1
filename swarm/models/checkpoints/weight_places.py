"""Where in a model packed weights and those of experts belong: in a layer, or among what one parameter fuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from swarm.errors import CheckpointError
from swarm.models.weights.frozen_linear import FrozenLinear
from swarm.models.weights.packed import PackedExperts, PackedWeight

Hold = Callable[[PackedWeight, int, nn.Parameter | None], FrozenLinear]
"""Makes the layer for a packed weight that stays packed, from the weight, the number of the expert, and the bias."""

Weight = TypeVar("Weight", PackedWeight, torch.Tensor)

_MERGED = [["MergeModulelist"], ["MergeModulelist", "Concatenate"]]
"""transformers' operations that fuse experts: a list becomes one tensor, and two tensors lie one behind the other."""


@dataclass(frozen=True)
class Place:
    """A parameter of a model on the meta device, and the packed weights that it consists of.

    Attributes:
        path, name: of the module that has it, and its name there.
        shape: of the parameter.
        weights: for each part of the rows, the weights of the experts. A weight that is the whole parameter is alone.
        is_fused: whether each weight is that of one expert.
    """

    path: str
    name: str
    shape: torch.Size
    weights: Sequence[Sequence[PackedWeight]]
    is_fused: bool

    def fill(self, model: nn.Module, dtype: torch.dtype, hold: Hold | None) -> None:
        """Give the model the parameter, packed if it can be and `hold` is given, else unpacked in `dtype`."""
        owner: Any = model.get_submodule(self.path)
        if hold is None or not self._can_stay_packed(owner):
            setattr(owner, self.name, nn.Parameter(self._unpacked(dtype), requires_grad=False))
        elif type(owner) is nn.Linear:
            parent, _, child = self.path.rpartition(".")
            setattr(model.get_submodule(parent), child, hold(self.weights[0][0], 0, owner.bias))
        elif self.is_fused:
            setattr(owner, self.name, PackedExperts([[hold(one, 0, None) for one in part] for part in self.weights]))
        else:
            whole = self.weights[0][0]
            setattr(owner, self.name, PackedExperts([[hold(whole, one, None) for one in range(self.shape[0])]]))

    def _can_stay_packed(self, owner: Any) -> bool:
        is_transposed = any(one.is_transposed for part in self.weights for one in part)
        if type(owner) is nn.Linear:
            return self.name == "weight" and not is_transposed
        # transformers marks the classes whose plain loop multiplies by one expert's weight at a time.
        return len(self.shape) == 3 and getattr(owner, "is_transposed", None) is is_transposed

    def _unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        if not self.is_fused:
            return self.weights[0][0].dense(dtype)
        found = torch.empty(self.shape, dtype=dtype)
        for one, place in _parts_of(found, self.weights):
            one.fill(place)
        return found


def take_places(model: PreTrainedModel, packed: dict[str, PackedWeight]) -> list[Place]:
    """Take the weights that have a place in the model out of `packed`, and their parameters out of the model.

    transformers' own tables say how it names and fuses what a checkpoint has. What they do otherwise than by fusing
    experts stays in `packed`, for transformers to convert once it is unpacked.

    Raises:
        CheckpointError: a weight has another shape than config.json describes.
    """
    places = []
    for target, names, is_fused in _targets(model, packed):
        weights = [[packed[name] for name in part] for part in names]
        shape = model.get_parameter(target).shape
        _require_shape(target, weights, shape, is_fused)
        for name in (one for part in names for one in part):
            del packed[name]
        path, _, name = target.rpartition(".")
        owner: Any = model.get_submodule(path)
        del owner._parameters[name]
        owner._is_hf_initialized = True  # else transformers initializes what is not there
        places.append(Place(path, name, shape, weights, is_fused))
    return places


def fuse_experts(model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Replace weights of experts in `tensors` by the parameters that fuse them, one after the other.

    transformers would hold all of them twice for that.

    Raises:
        CheckpointError: they have other shapes than config.json describes.
    """
    plain = [name for name, one in tensors.items() if one.ndim == 2 and one.is_floating_point()]
    for target, names, is_fused in _targets(model, plain):
        if not is_fused:
            continue
        weights = [[tensors.pop(name) for name in part] for part in names]
        shape = model.get_parameter(target).shape
        _require_shape(target, weights, shape, is_fused)
        tensors[target] = torch.empty(shape, dtype=dtype)
        for one, place in _parts_of(tensors[target], weights):
            place.copy_(one)


def _targets(model: PreTrainedModel, names: Iterable[str]) -> list[tuple[str, list[list[str]], bool]]:
    """The parameters that weights of these names become by transformers' tables.

    Each with the names for every part of its rows, and whether each of them is that of one expert.
    """
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    parameters = {name: one for name, one in model.named_parameters() if name not in tied and name not in tied.values()}
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    found: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = name, None
        if target in parameters:
            found.setdefault(target, {}).setdefault(pattern, []).append(name)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    ordered = ((target, _in_order(names, by_pattern), None not in names) for target, names in found.items())
    return [(target, names, is_fused) for target, names, is_fused in ordered if names is not None]


def _in_order(
    names: Mapping[str | None, list[str]], converters: Mapping[str, WeightConverter]
) -> list[list[str]] | None:
    """The names of a parameter's weights, for each part of its rows; None if it takes something else to make it."""
    if None in names:
        return [names[None]] if len(names) == 1 and len(names[None]) == 1 else None
    converter = converters[next(one for one in names if one is not None)]
    kinds = [type(one).__name__ for one in converter.operations]
    dims = [getattr(one, "dim", None) for one in converter.operations]
    if kinds not in _MERGED or dims != [0, 1][: len(dims)] or len(converter.target_patterns) != 1:
        return None
    is_whole = set(names) == set(converter.source_patterns) and len(kinds) == min(2, len(names))
    return [names[one] for one in converter.source_patterns] if is_whole else None


def _parts_of(fused: torch.Tensor, weights: Sequence[Sequence[Weight]]) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Each expert's weights, and their places in the parameter that fuses them."""
    start = 0
    for part in weights:
        end = start + part[0].shape[0]
        yield from ((one, fused[expert, start:end]) for expert, one in enumerate(part))
        start = end


def _require_shape(target: str, weights: Sequence[Sequence[Weight]], shape: torch.Size, is_fused: bool) -> None:
    found: tuple[int, ...] = weights[0][0].shape
    if is_fused:
        parts = [{one.shape for one in part} for part in weights]
        sizes = [next(iter(one)) for one in parts]
        fits = all(len(one) == 1 for one in parts) and all(len(one) == 2 and one[1] == sizes[0][1] for one in sizes)
        if not fits or len({len(part) for part in weights}) != 1:
            raise CheckpointError(f"the experts of {target} have different shapes: {sorted(set().union(*parts))}")
        found = (len(weights[0]), sum(one[0] for one in sizes), sizes[0][1])
    if found != tuple(shape):
        raise wrong_shape(target, found, shape)


def wrong_shape(name: str, found: Sequence[int], described: Sequence[int]) -> CheckpointError:
    """The error for a weight that config.json describes in another shape."""
    return CheckpointError(
        f"{name} has the shape {list(found)} in the checkpoint, but config.json describes {list(described)}: they "
        "are of different models, or one of the files is damaged; download the model again"
    )
