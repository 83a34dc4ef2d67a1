"""The client's part of a model: embeddings, final norm and head, around one layer that replaces all blocks.

The result is the family's own model for the task, so embedding scale, learned positions, norms, soft-capping,
`generate` and the pooling of a classification are the family's own code.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface

from swarm.data_structures import Span
from swarm.errors import UnsupportedModel
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.partial_loading import load_partial_model
from swarm.models.cutting import cut_layers, families

NO_MASK_ATTENTION = "remote"
"""Name of the attention implementation in a client's config. Its masks are empty, because no layer reads them."""

Task = Literal["CAUSAL_LM", "SEQ_CLS"]
"""The model's task: to continue a text, or to classify it. The names are PEFT's."""


@dataclass(frozen=True)
class BlocklessModel:
    """A family's model without its blocks.

    Attributes:
        model: the family's model, frozen.
        owner: the module inside it that calls the blocks.
        path: path of the blocks in the whole model, such as "model.layers".
        head: name of the module that classifies, such as "score"; None for a language model.
    """

    model: Any
    owner: nn.Module
    path: str
    head: str | None


def load_blockless_model(
    checkpoint: Checkpoint,
    layer: nn.Module,
    mixin: type,
    *,
    dtype: torch.dtype,
    task: Task = "CAUSAL_LM",
    num_labels: int | None = None,
) -> BlocklessModel:
    """Load the family's model for the task, with `layer` in place of its blocks.

    Args:
        layer: called like a decoder layer; it gets the plain attributes of the family's first layer.
        mixin: first base class of the model's class.
        num_labels: number of classes; None for the config's. A head that the checkpoint lacks is initialized.

    Raises:
        UnsupportedModel: the family has no model for the task.
        CheckpointError: the checkpoint lacks tensors of the model.
    """
    config = copy.deepcopy(checkpoint.config)
    if num_labels is not None:
        config.num_labels = num_labels
    blocks = checkpoint.blocks
    tensors = checkpoint.client_tensors(dtype)
    family_class = (families.causal_lm_class if task == "CAUSAL_LM" else families.classification_class)(config)
    # Servers go back to any position, also where their layers have states.
    members = {"__module__": family_class.__module__, "_is_stateful": False}
    model_class = type(family_class.__name__, (mixin, family_class), members)

    found: list[tuple[str, nn.Module, str | None]] = []

    def cut(model: Any) -> None:
        path, owner, name = cut_layers.find_layers(model, blocks)
        found.append((path, owner, _head_name(model) if task == "SEQ_CLS" else None))
        first = getattr(owner, name)[0]
        for key, value in vars(first).items():
            if isinstance(value, (bool, int, str)) and key != "training" and not hasattr(layer, key):
                setattr(layer, key, value)  # such as attention_type, which some families read from the layer
        setattr(owner, name, nn.ModuleList([layer]))
        if config.model_type in families.FILL_THEIR_LAYERS:
            vars(owner)["_is_hf_initialized"] = True

    def may_be_missing(name: str) -> bool:
        return found[-1][2] is not None and name.startswith(f"{found[-1][2]}.")

    model = load_partial_model(model_class, config, cut, tensors, dtype, may_be_missing)
    AttentionMaskInterface.register(NO_MASK_ATTENTION, _empty_mask)
    # A model that wraps another one may have given it a copy of its config.
    for one in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        cut_layers.slice_config(one, Span(0, 1), blocks)
        one.use_cache = False  # a plain forward pass caches nothing; generate() requests a cache itself
        one._attn_implementation_internal = NO_MASK_ATTENTION
    settings = checkpoint.generation_config() if task == "CAUSAL_LM" else None
    if settings is not None:
        model.generation_config = settings
    path, owner, head = found[-1]
    if not hasattr(model, model.base_model_prefix):  # llama4_text says "language_model", and has "model"
        model.base_model_prefix = path.partition(".")[0]
    return BlocklessModel(model, owner, path, head)


def _head_name(model: Any) -> str:
    """Name of the module with weights besides the base model."""
    for name, child in model.named_children():
        if name != model.base_model_prefix and next(child.parameters(), None) is not None:
            return str(name)
    raise UnsupportedModel(f"{type(model).__name__} has no head besides its {model.base_model_prefix}")


def _empty_mask(*args: Any, device: torch.device | str | None = None, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
