"""Which model families can be cut into spans, and what is special about some of them.

No block code is ported: spans run the family's own code. A family is named here only if it needs special treatment, or
if an error message should explain why it cannot be served.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from swarm.errors import UnsupportedModel

if not torch.cuda.is_available():  # transformers advises to install kernels for hybrids, which are for GPUs
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)

SEVERAL_HIDDEN_STATES = "its layers pass several hidden states of each token on, and servers send one"
OWN_CACHE = "what its layers keep of a text lies in a cache of its own kind, which servers do not have"

UNSUPPORTED_FAMILIES = {
    "cpmant": "transformers computes it from tokens only, not from the hidden states that a server gets",
    "deepseek_v4": SEVERAL_HIDDEN_STATES,
    "gemma3n_text": "its later layers reuse the keys and values of earlier ones",
    "glm5_next_text": SEVERAL_HIDDEN_STATES,
    "hrm_text": "each token runs through its layers several times, in cycles",
    "hy_v4": SEVERAL_HIDDEN_STATES,
    "inkling2_text": "its layers mix what several earlier ones returned",
    "inkling_text": "its attention depends on the longest of the texts that are computed together",
    "longcat_flash": "each of its layers holds two attention layers",
    "openai-gpt": "it keeps nothing of a text, so each token would need all of it again",
    "qwen4_exp_text": SEVERAL_HIDDEN_STATES,
    "recurrent_gemma": "it keeps the states of its layers in the model itself, where those of clients would be mixed",
    **dict.fromkeys(("minimax", "reformer", "rwkv", "xlm", "xlnet", "xlstm"), OWN_CACHE),
    **dict.fromkeys(("zamba", "zamba2"), "some of its layers get the tokens' embeddings beside the hidden states"),
    "zaya": "its layers need weights that belong to none of them",
}
"""Families whose blocks exchange more than hidden states, or keep what a server cannot keep for a session."""

INSTEAD = {
    "deepseek_v4": "DeepSeek V3.2, V3.1 and R1 are served",
    "gemma3n_text": "Gemma 3 is served, and the sizes 12B, 26B-A4B and 31B of Gemma 4",
    "gemma4_text": "the sizes 12B, 26B-A4B and 31B of Gemma 4 are served",
    "glm5_next_text": "GLM-5, GLM-5.1 and GLM-4.7-Flash are served",
    "glm_moe_dsa": "GLM-5 and GLM-5.1 are served",
    "hy_v4": "Hy3 is served",
    "kimi_k3": "Kimi K2 to K2.7 are served",
    "mimo_v2": "MiMo-V2-Flash is served",
    "minimax": "MiniMax-M2 to M2.7 are served",
    "minimax_m3_vl_text": "MiniMax-M2 to M2.7 are served",
    "openai-gpt": "GPT-2 is served",
    "phi4_multimodal": "Phi-4 and Phi-4-mini are served",
    "qwen4_exp_text": "Qwen3.5 and Qwen3.6 are served",
    "recurrent_gemma": "Gemma 2 and 3 are served",
    **dict.fromkeys(("zamba", "zamba2"), "Bamba, Jamba and Falcon-H1 are served"),
}
"""What people who have one of these families can use in its place."""

SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
"""Types of models that are published with code of their own, and the family of transformers that computes the same."""

PLAIN_HEADS = {
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("glm4v_text", "glm4v_moe_text", "mistral4"),
}
"""Families inside wrappers that have no causal language model of their own: the wrapper adds one matrix to them."""

OTHER_NAME_OF_CACHE = {"falcon_mamba", "mamba", "mamba2"}
"""Families whose models call their cache `cache_params`; all their layers have a state, and nothing else."""

EXPERTS_AS_IN_WRAPPER = {"glm4v_moe_text": "glm4v_moe", "qwen3_vl_moe_text": "qwen3_vl_moe"}
"""Families whose experts transformers knows how to fuse or turn only for the whole wrapper."""

IMAGES = {
    *("mistral3", "llama4", "kimi_k25", "internvl", "llava", "llava_next", "llava_onevision", "aria", "idefics3"),
    *("smolvlm", "ovis2", "got_ocr2", "lighton_ocr", "deepseek_vl", "video_llama_3", "lfm2_vl", "exaone4_5"),
    *("janus", "vipllava"),
}
"""Wrappers whose images are served too: they put features in the place of tokens, and change nothing else."""

WRAPPERS = IMAGES | {
    *("gemma3", "gemma4", "gemma4_unified", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
    *("qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe", "fuyu", "hyperclovax_vision_v2", "moss_transcribe_diarize"),
    *("voxtral", "qwen2_audio", "dots3_note"),
}
"""Wrappers that compute a text as the model inside does, each compared with it by a test. Some others do not: in
paligemma each token of a prompt sees the whole prompt, and aya_vision leaves out a factor of the logits."""

IMAGES_SEE_THEMSELVES = "the tokens of an image see those behind them there, and servers let tokens see those before"
THREE_POSITIONS = "its tokens have positions of three numbers there (time, row and column), and servers are sent one"

WHY_NO_IMAGES = {
    **dict.fromkeys(("gemma3", "gemma4", "gemma4_unified"), IMAGES_SEE_THEMSELVES),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"), THREE_POSITIONS),
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), THREE_POSITIONS),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), THREE_POSITIONS + ", and some blocks get features of images as well"),
}
"""Wrappers whose texts are served and whose images are not."""

POSITIONS_FROM_CACHE_LENGTH = {"llama4_text"}
"""Families that derive a token's position from the cache length, which differs between sequences of a batch."""

FILL_THEIR_LAYERS = {"falcon_h1"}
"""Families whose model, when it is initialized, fills tensors in its layers, which a client does not have."""

FORGET_STATES = {"falcon_mamba", "jamba", "mamba"}
"""Families whose layers begin anew, without a word, where several tokens continue a sequence."""

LAYER_TYPES_WITH_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Layer types that keep a state, which each token changes, alone or beside keys and values."""

SUPPORTED_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention", "mlp", "moe"),
    *LAYER_TYPES_WITH_STATES,
}
"""Layer types that keep keys and values, a state, or nothing."""

REQUIRED_FORWARD_ARGUMENTS = ("inputs_embeds", "attention_mask", "past_key_values", "use_cache")
"""Arguments with which a span calls the family's base model; a recurrent family takes a state instead."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model in a wrapper that adds images or sound; `config` itself if it is not a wrapper.

    What belongs to the whole checkpoint goes with it: dtype, quantization, and whether the head is the embeddings.

    Raises `UnsupportedModel` if it is not known that the wrapper computes a text as the model inside does.
    """
    if config.is_encoder_decoder:
        return config
    text = config.get_text_config(decoder=True)
    if text is config or config.model_type.endswith("_assistant"):
        return config
    if config.model_type not in WRAPPERS:
        check_supported(text, f"the {text.model_type!r} in this {config.model_type!r}")
        raise UnsupportedModel(
            f"{config.model_type!r} adds images or sound to a model of the family {text.model_type!r}, and whether it "
            "computes a text as that one does is not known; a checkpoint of that model alone may work"
        )
    if text.model_type in EXPERTS_AS_IN_WRAPPER:
        conversions = get_checkpoint_conversion_mapping(EXPERTS_AS_IN_WRAPPER[text.model_type])
        register_checkpoint_conversion_mapping(text.model_type, conversions, overwrite=True)
    for name in ("dtype", "quantization_config", "quantization"):
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text._name_or_path = config._name_or_path
    return text


def check_images(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel`, with the reason, unless the model that is published with this config takes images."""
    family = config.model_type
    if family not in WRAPPERS:
        raise UnsupportedModel(f"a model of the family {family!r} takes no images; leave them out")
    if family not in IMAGES:
        why = WHY_NO_IMAGES.get(family, "whether they are computed as its own class does it is not known")
        raise UnsupportedModel(
            f"texts of {family!r} are served, images are not: {why}. Leave them out, or use a model whose "
            "images are served, such as mistral3, llama4, kimi_k25 or internvl"
        )


def check_supported(config: PreTrainedConfig, name: str | None = None) -> None:
    """Raise `UnsupportedModel`, with the reason, unless the family can be cut into spans. Needs no weights.

    Args:
        name: what to call the model; None for its type.
    """
    problem = _problem(config)
    if problem:
        instead = INSTEAD.get(config.model_type, "docs/models.md lists what is")
        raise UnsupportedModel(f"{name or repr(config.model_type)} cannot be served: {problem}; {instead}")


def _problem(config: PreTrainedConfig) -> str:
    """Why a family cannot be cut into spans; empty if it can."""
    family = config.model_type
    if family.endswith("_assistant"):
        return "it drafts for another model, and does not write texts by itself; serve that one"
    if family in UNSUPPORTED_FAMILIES:
        return UNSUPPORTED_FAMILIES[family]
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and swarm serves decoder-only language models"
    has_head = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or family in PLAIN_HEADS
    if not has_head or type(config) not in MODEL_MAPPING:
        return "transformers has no causal language model of this type, and swarm runs no other code"
    arguments = inspect.signature(base_class(config).forward).parameters
    if not hasattr(config, "num_hidden_layers") or any("pixel_values" in name for name in arguments):
        return "it combines several models (text, images or audio), and swarm serves language models"
    if hasattr(config, "is_decoder") and "encoder_hidden_states" in arguments:
        return "it is a family of encoders, and swarm serves decoder-only language models"
    # recurrent_gemma had only the second name before transformers 5.20.
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    unsupported = sorted(set(layer_types) - SUPPORTED_LAYER_TYPES)
    if unsupported:
        return f"some of its layers are of the type {' and '.join(unsupported)}, which servers cannot continue"
    if any(name not in arguments for name in REQUIRED_FORWARD_ARGUMENTS):
        return OWN_CACHE
    if getattr(config, "num_kv_shared_layers", 0):
        return "it shares keys and values between layers, which may be on different servers"
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        return "some of its layers attend to what an earlier layer chose, which may be on another server"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "each of its layers has embeddings of its own, which servers do not get"
    return ""


def has_states(config: PreTrainedConfig) -> bool:
    """Whether some layers of the whole model keep a state (`swarm.models.attention.sequence_states`)."""
    return not LAYER_TYPES_WITH_STATES.isdisjoint(getattr(config, "layer_types", None) or ())


def base_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model without a head."""
    family_class = _only(MODEL_MAPPING[type(config)])
    return _with_usual_cache(family_class) if config.model_type in OTHER_NAME_OF_CACHE else family_class


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The family's model with a language modelling head."""
    if config.model_type in PLAIN_HEADS:
        return _with_plain_head(base_class(config), "model", "embed_tokens")
    if config.model_type in OTHER_NAME_OF_CACHE:
        return _with_plain_head(base_class(config), "backbone", "embeddings")
    return _only(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def _with_usual_cache(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """This base model with the arguments and outputs that all other families have."""

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        outputs = base.forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache_params=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        return BaseModelOutputWithPast(outputs.last_hidden_state, outputs.cache_params)

    return type(base.__name__, (base,), {"__module__": base.__module__, "forward": forward})


def _with_plain_head(base: type[PreTrainedModel], name: str, embeddings: str) -> type[PreTrainedModel]:
    """A causal language model of this base model and one matrix.

    Args:
        name: of the base model in it.
        embeddings: name of the base model's embeddings.
    """
    parent = next(one for one in base.__mro__ if one.__name__.endswith("PreTrainedModel"))

    def build(self: Any, config: PreTrainedConfig) -> None:
        parent.__init__(self, config)  # type: ignore[misc]
        setattr(self, name, base(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        outputs = getattr(self, name)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **more,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **more)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    members = {
        "__init__": build,
        "__module__": base.__module__,
        "forward": forward,
        "base_model_prefix": name,
        "_tied_weights_keys": {"lm_head.weight": f"{name}.{embeddings}.weight"},
    }
    class_name = base.__name__.removesuffix("Model").removesuffix("Text") + "ForCausalLM"
    return type(class_name, (parent, GenerationMixin), members)


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
