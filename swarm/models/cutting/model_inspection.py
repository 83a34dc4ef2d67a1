"""What one has to know of a model before any weight is read, found out on the meta device (which holds no data)."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.cutting import families, surgery


@dataclass(frozen=True)
class ModelStructure:
    """Attributes:
    path: where the family's base model keeps its decoder layers, such as "layers" or "decoder.layers".
    outputs: what a layer returns: 0 for a tensor, n for a tuple of n that begins with one.
    parameters: numbers in the weights of each block.
    cached_values: numbers that one position leaves in the attention cache of one block.
    """

    path: str
    outputs: int
    parameters: tuple[int, ...]
    cached_values: int


def inspect_model(config: PreTrainedConfig) -> ModelStructure:
    """Build the model of `config` without data and run one token through its first layers."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    blocks = families.number_of_blocks(config)
    path, _, _ = surgery.find_layers(model, blocks)
    layers = model.get_submodule(path)
    outputs, cached = _run_one_token(model, layers, config, blocks)
    parameters = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    return ModelStructure(path, outputs, parameters, cached)


def _run_one_token(model: Any, layers: Any, config: PreTrainedConfig, blocks: int) -> tuple[int, int]:
    outputs = [0]

    def look(module: nn.Module, args: Any, output: Any) -> None:
        outputs[0] = len(output) if isinstance(output, tuple) else 0

    layers[0].register_forward_hook(look)
    cache = PaddedKV(blocks)
    # A mixture of experts routes by value, which the meta device has not: the run then ends behind the first layer's
    # attention. Such layers return tensors, and the cache has been written by then.
    with suppress(Exception), torch.device("meta"):
        model(inputs_embeds=torch.empty(1, 1, config.hidden_size), past_key_values=cache, use_cache=True)
    written = [layer for layer in cache.layers if layer.is_initialized]
    if not written:
        return outputs[0], 2 * config.hidden_size  # no family is narrower: one key and one value a head
    return outputs[0], max(_values(layer.keys) + _values(layer.values) for layer in written)


def _values(storage: torch.Tensor) -> int:
    return storage.shape[1] * storage.shape[3]
