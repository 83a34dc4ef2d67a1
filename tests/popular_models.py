"""The fifty language models that people run most in 2026, each as a tiny checkpoint in the layout of its files.

What is kept of each: the type in its config, what its layers are and in which order, the ways in which its rotary
positions are scaled, whether the head is the embeddings, the names of its tensors, and the format of its weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests import wrappers, zoo
from tests.models import test_all_families
from tests.models.checkpoints import packed_layouts
from tests.models.checkpoints.packed_layouts import Drawn

PACKED = re.compile(
    r"(?!.*(?:vision|visual|audio|projector|in_proj_[ab]\b)).*\blayers\.\d+\..*(?:_proj\w*|\bw[123])\.weight"
)
"""Names of the weights that are published packed: not those of towers, routers and heads, nor very small ones."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Popular:
    """A model, or several that differ in size only.

    Attributes:
        name: as people call it.
        kind: family in the zoo's tables, or type in `wrappers.TABLE`.
        changes: of the language model's config.
        layout: of its weights, in `packed_layouts.LAYOUTS`, or "MXFP4"; None for plain ones.
        published: keys of config.json that the published file has in place of those that transformers writes; None for
            one that it does not have.
        refused: part of the words in which it is refused; empty if it is served.
    """

    name: str
    kind: str
    changes: Values = field(default_factory=dict)
    layout: str | None = None
    published: Values = field(default_factory=dict)
    refused: str = ""


WIDE = {
    **{"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64},
    **{"shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
}
"""Sizes that weights in groups of 64 can have."""

TIED = {"tie_word_embeddings": True}
BLOCKS, INT4, WHOLE = "fp8 blocks", "compressed-tensors int4", "fp8 whole tensors"
THREE_OF_FOUR = {"layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention", "full_attention"]}
SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
QWEN3_5 = {
    **{**WIDE, **THREE_OF_FOUR, "head_dim": 16, "partial_rotary_factor": 0.25},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, **SECTIONS},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LATENT = {**WIDE, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
DEEPSEEK = {
    "rope_theta": 10000,
    "rope_parameters": None,
    "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FIVE_OF_SIX = {"layer_types": [*["sliding_attention"] * 5, "full_attention"]}
GEMMA4 = {**WIDE, **FIVE_OF_SIX, "tie_word_embeddings": True, "head_dim": 32, "global_head_dim": 64}
DENSE = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
WITH_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}

MODELS = (
    Popular("Qwen3.6-35B-A3B", "qwen3_5_moe", QWEN3_5, BLOCKS),
    Popular("Qwen3.6-27B", "qwen3_5", QWEN3_5, BLOCKS),
    Popular("Qwen3.5-0.8B … 9B", "qwen3_5", {**QWEN3_5, **TIED}),
    Popular("Qwen3.5-122B-A10B, 397B-A17B", "qwen3_5_moe", QWEN3_5, "GPTQ"),
    Popular("Qwen3-Coder-Next, Qwen3-Next-80B", "qwen3_next", {**WIDE, **THREE_OF_FOUR}, BLOCKS),
    Popular("Qwen3-VL", "qwen3_vl", {**WIDE, **TIED}, BLOCKS),
    Popular(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        {**WIDE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        "AWQ",
    ),
    Popular("Qwen3-0.6B … 32B", "qwen3", {**WIDE, **TIED, "use_sliding_window": False}, "AWQ"),
    Popular("Qwen3-30B-A3B, Coder-30B", "qwen3_moe", {**WIDE, "mlp_only_layers": []}, BLOCKS),
    Popular("Qwen3-235B-A22B, Coder-480B", "qwen3_moe", {**WIDE, "mlp_only_layers": []}, "GPTQ"),
    Popular(
        "Qwen2.5-0.5B … 72B, Coder",
        "qwen2",
        {**WIDE, **TIED, "use_sliding_window": False},
        "GPTQ",
        {"rope_theta": 1e6, "rope_parameters": None, "max_window_layers": 3},
    ),
    Popular("Gemma 4 26B-A4B", "gemma4", GEMMA4, INT4),
    Popular("Gemma 4 31B", "gemma4", {**GEMMA4, **DENSE}, INT4),
    Popular(
        "Gemma 4 E2B, E4B", "gemma4", {"num_kv_shared_layers": 2}, refused="12B, 26B-A4B and 31B of Gemma 4 are served"
    ),
    Popular("Gemma 4 12B", "gemma4_unified", {**FIVE_OF_SIX, **TIED}),
    Popular("Gemma 3 4B, 12B, 27B", "gemma3", {**FIVE_OF_SIX, **TIED}),
    Popular("gpt-oss-20b", "gpt_oss", WIDE, "MXFP4"),
    Popular("gpt-oss-120b", "gpt_oss", {**WIDE, "rope_parameters": {**YARN, "rope_theta": 150000.0}}, "MXFP4"),
    Popular(
        "DeepSeek-V4-Flash, -Pro", "deepseek_v4", refused="several hidden states .* DeepSeek V3.2, V3.1 and R1 are"
    ),
    Popular("DeepSeek-V3.2", "deepseek_v32", {**LATENT, "n_group": 2}, BLOCKS, DEEPSEEK),
    Popular("DeepSeek-R1-0528, V3.1", "deepseek_v3", LATENT, BLOCKS, DEEPSEEK),
    Popular("DeepSeek-R1-Distill-Qwen, -Llama", "qwen2", {"use_sliding_window": False}),
    Popular("Kimi-K2.5, K2.6, K2.7-Code", "kimi_k25", {**LATENT, **ONE_GROUP}, INT4),
    Popular("Kimi-K3", "kimi_k3", published=WITH_CODE, refused="code of its own.* Kimi K2 to K2.7 are served"),
    Popular(
        "Kimi-K2-Instruct, -Thinking",
        "deepseek_v3",
        {**LATENT, **ONE_GROUP},
        INT4,
        {**DEEPSEEK, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
    ),
    Popular("Kimi-Linear-48B-A3B", "kimi_linear", ONE_GROUP),
    Popular("GLM-5, GLM-5.1", "glm_moe_dsa", LATENT, BLOCKS),
    Popular(
        "GLM-5.3-Flash",
        "glm5_next",
        {"text_config": {"model_type": "glm5_next_text"}},
        refused="the 'glm5_next_text' in this 'glm5_next' .* several hidden states .* GLM-5, GLM-5.1",
    ),
    Popular("GLM-4.5, 4.6, 4.7, Air", "glm4_moe", {**WIDE, "use_qk_norm": True}, "compressed-tensors fp8"),
    Popular("GLM-4.7-Flash", "glm4_moe_lite"),
    Popular("MiniMax-M2 … M2.7", "minimax_m2", {**WIDE, "intermediate_size": 64}, BLOCKS),
    Popular(
        "MiniMax-M3",
        "minimax_m3_vl",
        {"text_config": {"num_hidden_layers": 4, "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1]}}},
        refused="of the type minimax_m3_sparse, which servers cannot continue; MiniMax-M2 to M2.7 are served",
    ),
    Popular("Hy3-preview", "hy_v3"),
    Popular("MiMo-V2-Flash", "mimo_v2_flash", WIDE, BLOCKS),
    Popular("MiMo-V2.5, V2.5-Pro", "mimo_v2", published=WITH_CODE, refused="MiMo-V2-Flash is served"),
    Popular("Step-3.5-Flash", "step3p5", published=WITH_CODE, refused="swarm runs no other code"),
    Popular(
        "Nemotron-3-Nano, -Super, -Ultra",
        "nemotron_h",
        {**WIDE, "head_dim": 32},
        "ModelOpt NVFP4",
        {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M-*ME*"},
    ),
    Popular(
        "Llama-3.1, 3.2, 3.3",
        "llama",
        TIED,
        published={
            "rope_theta": 500000.0,
            "rope_parameters": None,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 32},
        },
    ),
    Popular("Llama-4-Scout, -Maverick", "llama4", {"interleave_moe_layer_step": 1}),
    Popular("Mistral-Small-3.2, Magistral, Devstral-Small", "mistral3", {"sliding_window": None, "head_dim": 16}),
    Popular("Ministral-3 3B, 8B, 14B", "mistral3 (ministral3)", {**WIDE, **TIED}, WHOLE),
    Popular("Mistral-Small-4", "mistral3 (mistral4)", LATENT, WHOLE),
    Popular("Devstral-2-123B", "ministral3", WIDE, WHOLE),
    Popular("Granite 4.1", "granite", TIED),
    Popular(
        "Granite 4.0-H",
        "granitemoehybrid",
        {"position_embedding_type": "nope", **TIED},
        published={"layer_types": ["mamba", "mamba", "attention"] * 2},
    ),
    Popular("Phi-4", "phi3", {"sliding_window": None}),
    Popular(
        "Phi-4-mini",
        "phi3",
        {"sliding_window": None, **TIED},
        published={
            **{"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_parameters": None},
            **{"max_position_embeddings": 128, "original_max_position_embeddings": 32},
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0]},
        },
    ),
    Popular("LFM2, LFM2.5", "lfm2", {**TIED, "layer_types": ["conv", "conv", "full_attention"] * 2}),
    Popular("OLMo 3", "olmo3"),
    Popular("SmolLM3-3B", "smollm3", TIED),
)


def save(model: Popular, folder: Path) -> PreTrainedModel | None:
    """Write the model's checkpoint to `folder`, and return what transformers loads; None if the model is refused.

    Where weights are packed, that is the same model with the plain weights that they mean.
    """
    is_wrapper = model.kind in wrappers.TABLE
    if model.refused:
        folder.mkdir()
        described = {"text_config": dict(model.changes)} if is_wrapper else dict(model.changes)
        (folder / "config.json").write_text(json.dumps({"model_type": model.kind, **described, **model.published}))
        return None
    plain = folder.with_name(f"{folder.name} plain")
    if is_wrapper:
        wrappers.save(wrappers.make_wrapper(model.kind, **model.changes), plain)
    else:
        make_config = zoo.config_of if model.kind in {*zoo.TABLE, *zoo.HYBRIDS} else test_all_families.config_of
        whole = AutoModelForCausalLM.from_config(make_config(model.kind, **model.changes), dtype=torch.float32)
        zoo.spread_weights(whole, *zoo.TUNED.get(model.kind, (zoo.SEED, zoo.SPREAD)))
        whole.save_pretrained(plain)
    known = {name: value for name, value in model.published.items() if name not in ("model_type", "auto_map")}
    _change_config(plain, known)
    shutil.copytree(plain, folder)
    _change_config(folder, model.published)
    if model.layout == "MXFP4":  # which transformers unpacks
        plain = packed_layouts.pack_mxfp4(folder)
    elif model.layout is not None:
        pack(model.layout, plain, folder)
    kind = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    expected: PreTrainedModel = kind.from_pretrained(plain, dtype=torch.float32)
    return expected


def _change_config(folder: Path, changes: Values) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value is not None or name not in changes}
    (folder / "config.json").write_text(json.dumps(kept))


class Sharper(Drawn):
    """Larger weights, so that texts vary."""

    def scales(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 0.01) -> torch.Tensor:
        return super().scales(*shape, dtype=dtype, size=3 * size)


def pack(layout: str, plain: Path, folder: Path) -> None:
    """Pack the weights in `folder`, and write what the packed ones mean to `plain`."""
    tensors = load_file(plain / packed_layouts.SINGLE_FILE)
    for name in tensors:
        if name.endswith("embed_tokens.weight"):  # packed weights are small: blocks have to add more than there was
            tensors[name] *= 0.05
    dense, stored = dict(tensors), dict(tensors)
    quantization, write = packed_layouts.LAYOUTS[layout]
    for seed, (name, weight) in enumerate(sorted(tensors.items())):
        if PACKED.fullmatch(name) and weight.ndim == 2:
            drawn = Sharper(tuple(weight.shape), torch.Generator().manual_seed(1000 + seed))
            found, dense[name] = write(drawn)
            del tensors[name], stored[name]
            beside = {name.removesuffix("weight") + ending: one.clone() for ending, one in found.items()}
            stored |= {name: one for name, one in beside.items() if name not in tensors}  # a bias stays
    assert stored.keys() != dense.keys(), "nothing was packed"
    save_file(dense, plain / packed_layouts.SINGLE_FILE, {"format": "pt"})
    save_file(stored, folder / packed_layouts.SINGLE_FILE, {"format": "pt"})
    _change_config(folder, {"quantization_config": quantization})
