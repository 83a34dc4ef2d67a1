"""What a model family needs to be cut into spans, and which families cannot be.

No block code is ported: spans run the family's own code. A family appears here only if it needs a word, or if the
person asking for it deserves to hear why it cannot work.
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

CANNOT_BE_CUT = {
    "gemma3n_text": "its later layers reuse the keys and values of earlier ones",
    "gemma4_text": "its layers take per-layer embeddings and share keys and values",
    "hrm_text": "it runs its layers in cycles",
    "longcat_flash": "each of its layers holds two attention layers",
}
"""Families whose blocks exchange more than one hidden state, with the reason."""

POSITIONS_BY_SLOT = {"llama4_text"}
"""Families that take a token's place from the length of the cache, which tokens of several rows do not share."""

ATTENTION_ONLY = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Layer types that keep plain keys and values; others keep a recurrent state, which cannot be rolled back, or more."""

SPAN_ARGUMENTS = ("inputs_embeds", "attention_mask", "past_key_values", "use_cache")
"""What a span calls the family's base model with; a recurrent family takes a state instead."""


def check_supported(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` by name unless the family can be cut. Needs the config only, no weights."""
    family = config.model_type
    if family in CANNOT_BE_CUT:
        raise UnsupportedModel(f"models of the family {family!r} cannot be cut into spans: {CANNOT_BE_CUT[family]}")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{family!r} is an encoder-decoder; swarm serves decoder-only language models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model for the family {family!r}")
    arguments = inspect.signature(base_class(config).forward).parameters
    if not hasattr(config, "num_hidden_layers") or any("pixel_values" in name for name in arguments):
        raise UnsupportedModel(f"{family!r} combines several models (text, images or audio); swarm serves text models")
    if hasattr(config, "is_decoder") and "encoder_hidden_states" in arguments:
        raise UnsupportedModel(f"{family!r} is a family of encoders; swarm serves decoder-only language models")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_ONLY)
    if odd:
        raise UnsupportedModel(
            f"{family!r} has layers of type {', '.join(odd)}; swarm serves layers that keep keys and values only"
        )
    if any(name not in arguments for name in SPAN_ARGUMENTS):
        raise UnsupportedModel(f"{family!r} keeps no attention cache; swarm serves models whose layers use attention")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{family!r} shares keys and values between layers, which lie on different servers here")


def base_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model without a head."""
    return _only(MODEL_MAPPING[type(config)])


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model with a language modelling head."""
    return _only(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def classification_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model with a head that classifies whole texts. Raises `UnsupportedModel` if there is none."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UnsupportedModel(
            f"transformers has no {config.model_type!r} model that classifies texts; take another family, or put a "
            "head of your own behind model.base_model"
        )
    return _only(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])


def _only(entry: Any) -> type[PreTrainedModel]:
    only: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return only


def number_of_blocks(config: PreTrainedConfig) -> int:
    """How many decoder layers the whole model has."""
    return int(config.num_hidden_layers)
