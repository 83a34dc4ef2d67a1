"""Tiny random models that wrap a language model, to add images or sound, as they are published.

The language model inside is one of the zoo's. The towers only have to be there: no test looks at what they compute.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests import zoo

IMAGE = 127
"""The token in whose place the features of images come."""

TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "image_size": 28, "patch_size": 14},
    **{"out_hidden_size": 32, "num_key_value_heads": 4, "projection_dim": 32, "vision_output_dim": 32},
    **{"projector_input_dim": 32, "projector_output_dim": 32},
}
"""Sizes of a tower, by all the names that towers have for them."""

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
LATENT = zoo.TABLE["deepseek_v3"]

TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}, {}),
    "gemma4": (
        "gemma4_text",
        {
            **zoo.TABLE["gemma4_unified_text"],
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True},
            **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "attention_k_eq_v": True},
            **{"num_global_key_value_heads": 1},
        },
        {},
    ),
    "gemma4_unified": ("gemma4_unified_text", {}, {}),
    "llama4": ("llama4_text", {}, {"intermediate_size": 128}),
    "mistral3": ("mistral", {}, {}),
    "mistral3 (ministral3)": ("ministral3", zoo.GATED, {}),
    "mistral3 (mistral4)": ("mistral4", {**LATENT, "n_group": 1}, {}),
    "kimi_k25": ("deepseek_v3", {}, {}),
    "qwen2_vl": ("qwen2_vl_text", {**zoo.GATED, "rope_parameters": SECTIONS}, {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {**zoo.GATED, "rope_parameters": SECTIONS}, {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        "qwen3_vl_text",
        {**zoo.GATED, "head_dim": 8, "rope_parameters": SECTIONS},
        {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {**zoo.GATED, **MOE, "head_dim": 8, "rope_parameters": SECTIONS},
        {"deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("glm4v_text", {**zoo.GATED, "rope_parameters": SECTIONS}, {}),
    "glm46v": ("glm4v_text", {**zoo.GATED, "rope_parameters": SECTIONS}, {}),
    "glm4v_moe": ("glm4v_moe_text", {**zoo.TABLE["glm4_moe"], "rope_parameters": SECTIONS}, {}),
    "internvl": ("qwen2", {}, {"image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ("llama", {}, {}),
    "llava_next": ("llama", {}, {}),
    "llava_onevision": ("qwen2", {}, {}),
    "aria": ("aria_text", {**zoo.GATED, "moe_num_experts": 4, "moe_topk": 2}, {}),
    "exaone4_5": ("exaone4", {}, {}),
    "idefics3": ("llama", {}, {}),
    "smolvlm": ("llama", {}, {}),
    "ovis2": ("qwen2", {}, {}),
    "got_ocr2": ("qwen2", {}, {}),
    "video_llama_3": ("qwen2", {}, {}),
    "lighton_ocr": ("qwen3", {}, {}),
    "janus": ("llama", {}, {}),
    "fuyu": ("persimmon", zoo.COMMON, {}),
    "deepseek_vl": ("llama", {}, {}),
    "vipllava": ("llama", {}, {}),
    "hyperclovax_vision_v2": ("hyperclovax", zoo.GATED, {}),
    "moss_transcribe_diarize": ("qwen3", {}, {}),
    "voxtral": ("llama", {}, {}),
    "qwen2_audio": ("qwen2", {}, {}),
    "qwen3_5": (
        "qwen3_5_text",
        {**zoo.HYBRIDS["qwen3_5_text"], "head_dim": 8, "partial_rotary_factor": 1.0, "rope_parameters": SECTIONS},
        {},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**zoo.HYBRIDS["qwen3_5_moe_text"], "head_dim": 8, "partial_rotary_factor": 1.0, "rope_parameters": SECTIONS},
        {},
    ),
    "lfm2_vl": ("lfm2", zoo.HYBRIDS["lfm2"], {}),
    "dots3_note": (
        "dots3_note_text",
        {},
        {
            **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 32),
            "mlp_layer_types": ["dense"] * 2,
        },
    ),
}
"""Type of the wrapper to the family inside, its config if the zoo has none, and what is special about the tower."""

OWN: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "kimi_k25": {"projection_hidden_size": 32},
    "vipllava": {"vision_feature_layer": [-1, 1]},
    "llava_next": {"image_grid_pinpoints": [[28, 56], [56, 28]]},
    "llava_onevision": {"image_grid_pinpoints": [[28, 56], [56, 28]]},
}
"""What is special about the config of a wrapper itself."""

NAMES = ("language_model.model.", "model.language_model.", "model.")
"""What stands before the names of the language model's tensors, in the forms in which wrappers are published."""


def config_of(kind: str, tie_word_embeddings: bool = False, **changes: Any) -> PreTrainedConfig:
    """The config of a type in `TABLE`, the language model's with these changes."""
    family, overrides, tower = TABLE[kind]
    wrapper = kind.partition(" ")[0]
    # transformers changes the dictionaries of a config.
    tie = {"tie_word_embeddings": tie_word_embeddings}
    inside = copy.deepcopy({**zoo.TABLE.get(family, {}), **overrides, "model_type": family, **tie, **changes})
    towers = {name: {**TOWER, **tower} for name in ("vision_config", "audio_config")}
    own = {name: inside[name] for name in ("vocab_size", "hidden_size")} if wrapper in ("fuyu", "ovis2") else {}
    own |= {**OWN.get(wrapper, {}), **tie, "image_token_id": IMAGE, "pad_token_id": 0}
    return AutoConfig.for_model(wrapper, text_config=inside, **towers, **own)


def make_wrapper(kind: str, tie_word_embeddings: bool = False, **changes: Any) -> PreTrainedModel:
    """A model of a type in `TABLE`."""
    config = config_of(kind, tie_word_embeddings, **changes)
    kinds = (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    model_class = next(one[type(config)] for one in kinds if type(config) in one)
    with torch.random.fork_rng():
        torch.manual_seed(zoo.SEED)  # some weights of towers are not spread below
        model: PreTrainedModel = model_class(config).float().eval()
    zoo.spread_weights(model, zoo.SEED, zoo.SPREAD)
    return model


def save(model: PreTrainedModel, folder: Path, names: str | None = None) -> Path:
    """Save a wrapper as it is published.

    Args:
        names: one of `NAMES`; None for those that transformers gives to this wrapper's tensors.
    """
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        # transformers 5.23 turns too many names back when it saves this one.
        old = name.replace("model.blocks.", "model.layers.") if model.config.model_type == "kimi_k25" else name
        inside = re.sub(r"^(?:model\.)?language_model\.(?:model\.)?|^(?=lm_head)", "", old)
        if names is None or inside == old != "lm_head.weight":
            tensors[old] = tensor
        elif inside == "lm_head.weight":
            tensors["language_model." * names.startswith("language_model.") + inside] = tensor
        else:
            tensors[names + inside] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


TOKENS_OF_A_PICTURE = {
    **{"aria": 2, "llava_next": 14, "llava_onevision": 14},
    **dict.fromkeys(("llama4", "internvl", "idefics3", "smolvlm", "got_ocr2", "lfm2_vl"), 1),
}
"""How many tokens an image of 28 x 28 has, or of the size that the wrapper takes; others have 4."""


def pictures(kind: str, rows: int, each: int, seed: int) -> dict[str, torch.Tensor]:
    """Noise as images, `each` for every row of a batch, as the processor of this wrapper returns them."""
    wrapper, count = kind.partition(" ")[0], rows * each
    random = torch.Generator().manual_seed(seed)
    sizes: dict[str, torch.Tensor] = {}
    shape: tuple[int, ...] = (count, 3, 28, 28)
    if wrapper in ("mistral3", "lighton_ocr"):
        shape, sizes = (count, 3, 56, 56), {"image_sizes": torch.tensor([[56, 56]] * count)}
    elif wrapper in ("llava_next", "llava_onevision"):
        shape, sizes = (count, 3, 3, 28, 28), {"image_sizes": torch.tensor([[28, 56]] * count)}
    elif wrapper in ("idefics3", "smolvlm"):
        shape, sizes = (rows, each, 3, 28, 28), {"pixel_attention_mask": torch.ones(rows, each, 28, 28).long()}
    elif wrapper == "lfm2_vl":
        shape, sizes = (count, 4, 3 * 14 * 14), {"spatial_shapes": torch.tensor([[2, 2]] * count)}
        sizes["pixel_attention_mask"] = torch.ones(count, 4).long()
    elif wrapper in ("kimi_k25", "exaone4_5", "video_llama_3"):
        values = {"kimi_k25": (3, 14, 14), "exaone4_5": (3 * 2 * 14 * 14,), "video_llama_3": (3 * 14 * 14,)}
        shape, sizes = (16 * count, *values[wrapper]), {"image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
        if wrapper == "video_llama_3":
            sizes["image_merge_sizes"] = torch.tensor([2] * count)
    return {"pixel_values": torch.randn(shape, generator=random), **sizes}


def picture_tokens(kind: str) -> list[int]:
    """The tokens in whose place one image comes."""
    return [IMAGE] * TOKENS_OF_A_PICTURE.get(kind.partition(" ")[0], 4)
