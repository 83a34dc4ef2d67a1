"""How much memory a model's blocks take, read off the model built on the meta device: no weights are needed."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from swarm.models import families, surgery
from swarm.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Footprint:
    """Attributes:
    weights: bytes that the parameters of each block take.
    cache_per_token: bytes that one position takes in the attention cache of one block.
    """

    weights: tuple[int, ...]
    cache_per_token: int

    def of(self, start: int, end: int, cache_tokens: int) -> int:
        """Bytes for blocks [start, end) with a full cache."""
        return sum(self.weights[start:end]) + (end - start) * cache_tokens * self.cache_per_token


def footprint(checkpoint: Checkpoint, dtype: torch.dtype) -> Footprint:
    """Bytes of each block's weights and of one cached position, in `dtype`."""
    config = copy.deepcopy(checkpoint.config)
    with torch.device("meta"):
        model = families.base_class(config)(config)
    path, _, _ = surgery.find_layers(model, families.number_of_blocks(config))
    layers = model.get_submodule(path)
    weights = tuple(sum(p.numel() for p in layer.parameters()) * dtype.itemsize for layer in layers)
    return Footprint(weights, _cached_values(config) * dtype.itemsize)


def _cached_values(config: PreTrainedConfig) -> int:
    """Numbers that one position leaves in the attention cache of one block."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, which transformers caches expanded
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * (getattr(config, "num_key_value_heads", None) or heads) * head_size)
