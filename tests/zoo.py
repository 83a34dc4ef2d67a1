"""Tiny random models of many families, whose blocks differ from each other as they do in the real ones.

A table of configs, and nothing else that knows a family. Every model has six blocks, so that the spans 0:2, 2:3, 3:6
begin in the middle of the patterns (sliding and full attention, dense and mixture of experts, rotary or not), and
windows are shorter than the sequences of the tests. The weights are spread wide: with usual initial weights a tiny
model repeats one token whatever its blocks do, and a test that compares texts would prove nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

BLOCKS = 6
VOCABULARY = 128
WINDOW = 6
PROMPTS = ([17, 90, 3, 64, 121], [5, 33, 101, 77, 12, 58, 99, 41, 8])
"""Two prompts of different lengths; none holds the padding token."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,  # text ends where the test says
}
GATED = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
SPARSE = {**GATED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

TABLE: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mistral": {**GATED, "sliding_window": WINDOW},
    "qwen2": {**GATED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    "qwen3": {**GATED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4, "head_dim": 16},
    "gemma": {**GATED, "head_dim": 16},
    "gemma2": {**GATED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
    "gemma3_text": {
        **GATED,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "phi": GATED,
    "phi3": {**GATED, "sliding_window": WINDOW},
    "olmo2": GATED,
    "starcoder2": {**GATED, "sliding_window": WINDOW},
    "stablelm": {**GATED, "use_qkv_bias": True, "qk_layernorm": True},
    "granite": {
        **GATED,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "cohere": {**GATED, "use_qk_norm": True},
    "cohere2": {
        **GATED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "smollm3": {
        **GATED,
        "no_rope_layers": [1, 0, 1, 1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
    },
    "mixtral": {**GATED, "num_local_experts": 4, "sliding_window": WINDOW},
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe": {**SPARSE, "head_dim": 16, "mlp_only_layers": [0, 3]},
    "gpt_oss": {**GATED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "opt": {**COMMON, "ffn_dim": 48},
    "opt_projected": {
        **COMMON,
        "ffn_dim": 48,
        "hidden_size": 64,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "bloom": COMMON,
    "falcon": {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_multi_query": {**COMMON, "multi_query": True, "parallel_attn": True, "bias": True},
    "falcon_alibi": {**COMMON, "alibi": True, "multi_query": False, "parallel_attn": False},
    "gpt2": {**COMMON, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": COMMON,
    "gpt_neo": {
        **COMMON,
        "num_layers": BLOCKS,
        "attention_types": [[["global", "local"], BLOCKS // 2]],
        "window_size": WINDOW,
    },
    "gptj": {**COMMON, "rotary_dim": 4},
    "gpt_neox": {**COMMON, "intermediate_size": 48},
    "mpt": {**COMMON, "max_seq_len": 128},
    "ctrl": {**COMMON, "hidden_size": 64, "dff": 48, "n_positions": 128},
    "gemma4_unified_text": {
        **GATED,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {
        **GATED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    "deepseek_v3": {
        **GATED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    **{
        family: {
            **GATED,
            **{"num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 1},
            **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 4, "q_lora_rank": 16},
            **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
            # Many heads: where all of them score a position 0, it is left to chance which one is chosen.
            **{"index_topk": 4, "index_head_dim": 16, "index_n_heads": 16},
            **({"indexer_types": ["full"] * BLOCKS} if family == "glm_moe_dsa" else {}),
        }
        for family in ("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text")
    },
    "glm4": {**GATED, "head_dim": 16},
    "glm4_moe": {
        **GATED,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
    },
    "llama4_text": {
        **GATED,
        "intermediate_size_mlp": 48,
        "head_dim": 16,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0, 1, 0, 1],
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,
    },
    "olmoe": {**GATED, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**GATED, "intermediate_size": 24, "num_local_experts": 4, "sliding_window": WINDOW},
    "granitemoe": {**GATED, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        **GATED,
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 5,
    },
    "dots1": {
        **GATED,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_moe": {**GATED, "head_dim": 16, "num_experts": 4, "moe_topk": [2] * BLOCKS},
    "minimax_m2": {
        **GATED,
        "head_dim": 16,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "ernie4_5": {**GATED, "head_dim": 16},
    "hunyuan_v1_dense": {**GATED, "head_dim": 16},
    "seed_oss": {**GATED, "head_dim": 16},
    "exaone4": {**GATED, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    "olmo3": {
        **GATED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
}
"""Family, or a variant of one (`falcon_alibi`), to its config."""

LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 4},
}
NEMOTRON = ["linear_attention", "mlp", "full_attention", "linear_attention", "moe", "full_attention"]


def _mixed(kind: str) -> dict[str, Any]:
    return {"layer_types": [kind, kind, "full_attention"] * 2}


HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**GATED, **LINEAR, "head_dim": 16, **_mixed("linear_attention")},
    "qwen3_5_moe_text": {
        **SPARSE,
        **LINEAR,
        **_mixed("linear_attention"),
        "head_dim": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_next": {
        **SPARSE,
        **LINEAR,
        **_mixed("linear_attention"),
        "head_dim": 16,
        "shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": {**GATED, **LINEAR, "linear_num_value_heads": 2, **_mixed("linear_attention")},
    "lfm2": {**GATED, **_mixed("conv"), "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**SPARSE, **_mixed("conv"), "num_dense_layers": 2},
    "lfm3": {**GATED, **_mixed("conv")},
    "kimi_linear": {
        **TABLE["deepseek_v3"],
        **_mixed("linear_attention"),
        "linear_attn_config": {
            **{"short_conv_kernel_size": 4, "head_dim": 8, "num_heads": 4},
            **{"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]},
        },
    },
    "bailing_hybrid": {**TABLE["deepseek_v3"], **_mixed("linear_attention")},
    "nemotron_h": {
        **GATED,
        **{"head_dim": 8, "layers_block_type": NEMOTRON, "layer_types": NEMOTRON, "mamba_num_heads": 8},
        **{"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4, "conv_kernel": 4},
        **{"time_step_limit": [0.0, float("inf")], "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1},
    },
    "granitemoehybrid": {
        **GATED,
        **MAMBA,
        **_mixed("linear_attention"),
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    },
    "bamba": {**GATED, **MAMBA, "attn_layer_indices": [2, 5]},
    "jamba": {
        **GATED,
        **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        **{"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 3, "attn_layer_offset": 2},
    },
    "falcon_h1": {**GATED, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "mamba": {**COMMON, "state_size": 8},
    "mamba2": {**COMMON, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_mamba": {**COMMON, "state_size": 8},
}
"""Families some of whose layers keep a state in place of keys and values, or beside them."""

VARIANTS = {"opt_projected": "opt", "falcon_multi_query": "falcon", "falcon_alibi": "falcon"}
SEED, SPREAD = 2, 2.0
TUNED = {
    "bloom": (1, SPREAD),
    "ctrl": (1, 5.0),
    "falcon_alibi": (10, SPREAD),
    "gpt_bigcode": (1, SPREAD),
    "gptj": (3, SPREAD),
    "nemotron_h": (SEED, 1.0),
    "opt_projected": (11, 0.3),
    "phimoe": (3, SPREAD),
}
"""Seed and spread of families that repeat one token with the usual ones."""

# Before transformers 5.20 gemma2 computed with sdpa, which leaves its soft caps out: no reference for anything.
Gemma2PreTrainedModel._supports_sdpa = False

FAMILIES: tuple[str, ...] = tuple(TABLE)
REPRESENTATIVES = ("llama", "gpt2", "mixtral", "gemma2", "bloom", "deepseek_v3")
"""Families for tests that run real servers: rotary and learned positions and ALiBi, grouped and latent attention,
experts, windows and soft caps. What a single process can tell is tried with every family."""


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(VARIANTS.get(family, family), **{**(TABLE.get(family) or HYBRIDS[family]), **overrides})


def make_checkpoint(family: str, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Save a tiny model of `family` to `folder` as safetensors. The same family always has the same weights.

    Args:
        max_shard_size: such as "40KB", to obtain several shards and an index.
    """
    make_model(family).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_model(family: str, **overrides: Any) -> PreTrainedModel:
    """The model that `make_checkpoint` saves, if nothing of its config is overridden."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)  # some families draw biases, to which `spread_weights` only adds
        model = AutoModelForCausalLM.from_config(config_of(family, **overrides), dtype=torch.float32)
    spread_weights(model, *TUNED.get(family, (SEED, SPREAD)))
    return model


def save_tokenizer(folder: Path) -> None:
    """A token for each character of ASCII, in the order of their codes."""
    vocabulary = {chr(code): code for code in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def spread_weights(model: PreTrainedModel, seed: int, spread: float) -> None:
    """Random weights, so large that attention is sharp; norms, biases and attention sinks differ between blocks.

    Embeddings are small beside what the blocks add, or else a head that is tied to them repeats the last token.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight.data_ptr()
    distinct = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied weights once
    for pointer, tensor in distinct.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2:
            tensor.add_(0.1 * noise)
        else:
            tensor.copy_(noise * (0.3 if pointer == embedding else spread) / tensor.shape[-1] ** 0.5)


def greedy_texts(model: PreTrainedModel, tokens: int = 12) -> list[list[int]]:
    """What `model` says after each of `PROMPTS`, greedily."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def assert_text_varies(model: PreTrainedModel) -> None:
    """Greedy text of 12 tokens has at least four different ones after each prompt, or the family needs retuning."""
    for text in greedy_texts(model):
        assert len(set(text)) >= 4, f"{type(model).__name__} repeats itself: {text}"
