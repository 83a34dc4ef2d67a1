"""Cutting a transformers model: find its list of layers, keep some of them, and adapt the config.

The whole model is always built first, on the meta device (which costs no memory), and then cut. So whatever a family
decides from a layer's index when it builds the layer (dense or mixture of experts, rotary or not, sliding window) is
decided from the true index. Only lists that the family reads by position *during the forward pass* have to be sliced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from swarm.data_structures import Span
from swarm.errors import UnsupportedModel

LAYER_INDEX_ATTRIBUTES = ("layer_idx", "layer_id")
"""Attribute names under which families store a layer's index in the attention cache."""


LAYER_TYPE_LISTS = ("layer_types", "layers_block_type")
"""Attributes of configs that say what kind each layer is; some families compute them."""


def find_layers(model: nn.Module, blocks: int) -> tuple[str, nn.Module, str]:
    """Find the decoder layers: path from `model`, the module that owns the list, and the list's name in that module."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks and "expert" not in path:
            owner_path, _, name = path.rpartition(".")
            return path, model.get_submodule(owner_path), name
    raise UnsupportedModel(f"{type(model).__name__} has no list of {blocks} layers, so it cannot be cut into spans")


def slice_config(config: PreTrainedConfig, span: Span, blocks: int) -> None:
    """Change `config` in place to describe only the blocks of `span`: slices every list with one entry per block."""
    kind = type(config)
    computed = {
        name: getattr(config, name)[span.start : span.end]
        for name in LAYER_TYPE_LISTS
        if isinstance(getattr(kind, name, None), property)
    }
    if computed:  # by a rule about the whole model's blocks, which would name the wrong ones
        config.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **computed})
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == blocks and name != "architectures":
            setattr(config, name, value[span.start : span.end])
    config.num_hidden_layers = span.length


def renumber_layers(layers: nn.ModuleList) -> None:
    """Give the remaining layers their new indices, by which they address the attention cache."""
    for position, layer in enumerate(layers):
        for module in layer.modules():
            for name in LAYER_INDEX_ATTRIBUTES:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, position)


class PassThrough(nn.Module):
    """Replaces a norm or a projection whose weights this peer does not hold: returns its first tensor unchanged."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


class ZeroEmbedding(nn.Module):
    """Replaces an embedding whose weights this peer does not hold: returns a zero that can be added to any tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


def drop_weights(owner: nn.Module, keep: Iterable[str]) -> None:
    """Replace every child of `owner` that has parameters, except those in `keep`, by a module without weights.

    What the model then computes before its first layer is meaningless; the received hidden states replace it.
    """
    for name, child in list(owner.named_children()):
        if name not in keep and next(child.parameters(), None) is not None:
            setattr(owner, name, ZeroEmbedding() if isinstance(child, nn.Embedding) else PassThrough())


def slice_model(model: Any, path: str, start: int, end: int) -> Any:
    """A second model with layers [start, end) of the list at `path`: it shares the weights, but not config and list."""
    copied = owner = _copy_module(model)
    names = path.split(".")
    for name in names[:-1]:
        child = _copy_module(getattr(owner, name))
        setattr(owner, name, child)
        owner = child
    layers = list(getattr(owner, names[-1]))
    setattr(owner, names[-1], nn.ModuleList(layers[start:end]))
    copied.config = owner.config = copy.deepcopy(model.config)
    slice_config(copied.config, Span(start, end), len(layers))
    return copied


def _copy_module(module: nn.Module) -> Any:
    """A shallow copy with a child table of its own: a child that is replaced in the copy stays in the original."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    return result
