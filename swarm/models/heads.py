"""The client's part of a model: embeddings, final norm and head, around one layer that stands for all blocks.

The result is the family's own causal language model, so embedding scale, learned positions, norms, soft-capping and
`generate` are the family's own code.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface

from swarm.data_structures import Span
from swarm.models import families, surgery
from swarm.models.checkpoint import Checkpoint
from swarm.models.loading import load_cut

NO_MASK = "remote"
"""Name of the attention implementation that a client's config carries: its masks are empty, nobody reads them."""


def load_heads(checkpoint: Checkpoint, layer: nn.Module, mixin: type, *, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """The family's causal language model with `layer` in place of its blocks, and the module that calls the layer.

    Args:
        layer: called as a decoder layer; takes over the plain attributes of the family's first layer.
        mixin: class that the model's class inherits from first.
    """
    config = copy.deepcopy(checkpoint.config)
    blocks = checkpoint.blocks
    tensors = dict(checkpoint.read(checkpoint.is_head))
    family_class = families.causal_lm_class(config)
    model_class = type(family_class.__name__, (mixin, family_class), {"__module__": family_class.__module__})

    owners: list[nn.Module] = []

    def cut(model: Any) -> None:
        _, owner, name = surgery.find_layers(model, blocks)
        owners.append(owner)
        first = getattr(owner, name)[0]
        for key, value in vars(first).items():
            if isinstance(value, (bool, int, str)) and key != "training" and not hasattr(layer, key):
                setattr(layer, key, value)  # such as attention_type, which some families read off the layer
        setattr(owner, name, nn.ModuleList([layer]))

    model = load_cut(model_class, config, cut, tensors, dtype)
    surgery.slice_config(model.config, Span(0, 1), blocks)
    model.config.use_cache = False  # a plain forward keeps nothing; generate() asks for a cache by itself
    AttentionMaskInterface.register(NO_MASK, _empty_mask)
    model.config._attn_implementation_internal = NO_MASK
    settings = checkpoint.generation_config()
    if settings is not None:
        model.generation_config = settings
    return model, owners[-1]


def _empty_mask(*args: Any, device: torch.device | str | None = None, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
