"""Which model families can be cut into spans, and what is special about some of them.

No block code is ported: spans run the family's own code. A family is named here only if it needs special treatment, or
if an error message should explain why it cannot be served.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from swarm.errors import UnsupportedModel

UNSUPPORTED_FAMILIES = {
    "gemma3n_text": "its later layers reuse the keys and values of earlier ones",
    "gemma4_text": "its layers take per-layer embeddings and share keys and values",
    "hrm_text": "it runs its layers in cycles",
    "longcat_flash": "each of its layers holds two attention layers",
}
"""Families whose blocks exchange more than one hidden state, with the reason."""

POSITIONS_FROM_CACHE_LENGTH = {"llama4_text"}
"""Families that derive a token's position from the cache length, which differs between sequences of a batch."""

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Layer types that cache plain keys and values. Others keep, for example, a recurrent state, which cannot roll back."""

REQUIRED_FORWARD_ARGUMENTS = ("inputs_embeds", "attention_mask", "past_key_values", "use_cache")
"""Arguments with which a span calls the family's base model; a recurrent family takes a state instead."""


def check_supported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel`, with the reason, unless the family can be cut into spans. Needs no weights."""
    family = config.model_type
    if family in UNSUPPORTED_FAMILIES:
        raise UnsupportedModel(
            f"models of the family {family!r} cannot be cut into spans: {UNSUPPORTED_FAMILIES[family]}"
        )
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{family!r} is an encoder-decoder; swarm serves decoder-only language models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model for the family {family!r}")
    arguments = inspect.signature(base_class(config).forward).parameters
    if not hasattr(config, "num_hidden_layers") or any("pixel_values" in name for name in arguments):
        raise UnsupportedModel(f"{family!r} combines several models (text, images or audio); swarm serves text models")
    if hasattr(config, "is_decoder") and "encoder_hidden_states" in arguments:
        raise UnsupportedModel(f"{family!r} is a family of encoders; swarm serves decoder-only language models")
    # recurrent_gemma had only the second name before transformers 5.20.
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    unsupported = sorted(set(layer_types) - SUPPORTED_LAYER_TYPES)
    if unsupported:
        raise UnsupportedModel(
            f"{family!r} has layers of type {', '.join(unsupported)}; "
            "swarm serves only layers that keep keys and values"
        )
    if any(name not in arguments for name in REQUIRED_FORWARD_ARGUMENTS):
        raise UnsupportedModel(f"{family!r} keeps no attention cache; swarm serves models whose layers use attention")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{family!r} shares keys and values between layers, which may be on different servers")


def base_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model without a head."""
    return _only(MODEL_MAPPING[type(config)])


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model with a language modelling head."""
    return _only(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def classification_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model with a head that classifies texts. Raises `UnsupportedModel` if there is none."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UnsupportedModel(
            f"transformers has no {config.model_type!r} model that classifies texts; use another family, or add a "
            "head of your own after model.base_model"
        )
    return _only(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])


def _only(entry: Any) -> type[PreTrainedModel]:
    only: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return only


def number_of_blocks(config: PreTrainedConfig) -> int:
    """Number of decoder layers of the whole model."""
    return int(config.num_hidden_layers)
