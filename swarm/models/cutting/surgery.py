"""Cutting a transformers model: find its list of layers, keep some of them, and keep the config in step.

The model is always built whole on the meta device (which costs no memory) and cut afterwards. So whatever a family
decides from a layer's index while building it (dense or mixture of experts, rotary or not, sliding window) is decided
from the true index, and only lists that the family reads by position *during the forward pass* have to be sliced.
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

POSITION_NAMES = ("layer_idx", "layer_id")
"""What families call a layer's place in the attention cache."""


def find_layers(model: nn.Module, blocks: int) -> tuple[str, nn.Module, str]:
    """Where the decoder layers are: path from `model`, the module that owns the list, and the list's name there."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks and "expert" not in path:
            owner_path, _, name = path.rpartition(".")
            return path, model.get_submodule(owner_path), name
    raise UnsupportedModel(f"{type(model).__name__} has no list of {blocks} layers, so it cannot be cut into spans")


def slice_config(config: PreTrainedConfig, span: Span, blocks: int) -> None:
    """Make `config`, in place, describe the blocks of `span` only: their number and every list with one entry each."""
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == blocks and name != "architectures":
            setattr(config, name, value[span.start : span.end])
    config.num_hidden_layers = span.length


def renumber_layers(layers: nn.ModuleList) -> None:
    """Give the layers that were kept their new positions, by which they address the attention cache."""
    for position, layer in enumerate(layers):
        for module in layer.modules():
            for name in POSITION_NAMES:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, position)


class PassThrough(nn.Module):
    """Stands for a norm or a projection whose weights this peer does not hold: the hidden states go through it."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


class ZeroEmbedding(nn.Module):
    """Stands for an embedding whose weights this peer does not hold: a zero that can be added to any tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


def drop_weights(owner: nn.Module, keep: Iterable[str]) -> None:
    """Replace every child of `owner` that has parameters, except those in `keep`.

    What then comes out before the first layer has no meaning; the received hidden states take its place.
    """
    for name, child in list(owner.named_children()):
        if name not in keep and next(child.parameters(), None) is not None:
            setattr(owner, name, ZeroEmbedding() if isinstance(child, nn.Embedding) else PassThrough())


def slice_model(model: Any, path: str, start: int, end: int) -> Any:
    """A second model around layers [start, end) of the list at `path`: its own config and list, the same weights."""
    copied = owner = _with_own_children(model)
    names = path.split(".")
    for name in names[:-1]:
        child = _with_own_children(getattr(owner, name))
        setattr(owner, name, child)
        owner = child
    layers = list(getattr(owner, names[-1]))
    setattr(owner, names[-1], nn.ModuleList(layers[start:end]))
    copied.config = owner.config = copy.deepcopy(model.config)
    slice_config(copied.config, Span(start, end), len(layers))
    return copied


def _with_own_children(module: nn.Module) -> Any:
    result = copy.copy(module)
    result._modules = dict(module._modules)
    return result
