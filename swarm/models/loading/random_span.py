"""A span of random weights, made on its device: for trying and measuring a machine without a checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from swarm.data_structures import Span
from swarm.models.cutting import cut_layers, families
from swarm.models.execution.hooked_module import HookedModule
from swarm.models.execution.span_model import SpanModel
from swarm.models.weights import frozen_linear, quantization

INITIAL_SPREAD = 0.02
"""Standard deviation of weights."""


def llama_config(
    hidden: int, intermediate: int, heads: int, kv_heads: int, blocks: int, positions: int = 1 << 16
) -> PreTrainedConfig:
    """A config of Llama's kind with hardly any vocabulary."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=256,
        max_position_embeddings=positions,
    )


def make_random_span(
    config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device, quant: str = quantization.NONE
) -> SpanModel:
    """All blocks of a model of Llama's kind with random weights, in the padded layout (see `choose_layout`).

    Args:
        quant: form of the weights, see `swarm.models.weights.quantization`.

    Raises:
        InvalidOption: this machine cannot compute with this quantization.
        torch.OutOfMemoryError: the weights do not fit.
    """
    quantization.require_available(quant, device)
    with torch.device("meta"):
        model = families.base_class(config)._from_config(config, dtype=dtype)
    blocks = families.number_of_blocks(config)
    path, owner, name = cut_layers.find_layers(model, blocks)
    cut_layers.drop_weights(owner, keep=(name,))
    tables = dict(_tiny_likeness(config).named_buffers())
    for place, buffer in list(model.named_buffers()):
        parent, _, short = place.rpartition(".")
        model.get_submodule(parent).register_buffer(short, tables[place].to(device), persistent=False)
        assert tables[place].shape == buffer.shape
    for layer in model.get_submodule(path).children():
        layer.to_empty(device=device)
        _fill(layer)
        quantization.quantize(layer, quant, device)
        frozen_linear.prepack(layer)
    model.requires_grad_(False).eval()
    return SpanModel(HookedModule(model, path), Span(0, blocks), [""] * blocks, config.hidden_size)


def _tiny_likeness(config: PreTrainedConfig) -> nn.Module:
    """A model with the same tables of positions, and hardly any weights."""
    tiny = copy.deepcopy(config)
    tiny.num_hidden_layers, tiny.intermediate_size = 1, 16
    model: nn.Module = families.base_class(config)(tiny)
    return model


@torch.no_grad()
def _fill(layer: nn.Module) -> None:
    """Weights like those of a model that has just been initialized."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=INITIAL_SPREAD)
        else:
            parameter.fill_(1.0)
