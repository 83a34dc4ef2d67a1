"""Families that no other test tries: cut into spans, they compute a text as the whole model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests import wrappers, zoo
from tests.models.test_wrappers import assert_same, logits_of, logits_of_whole

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    **zoo.GATED,
    **{"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": zoo.WINDOW},
    **{"num_attention_groups": 2, "moe_num_experts": 4, "ffn_dim": 48, "attention_dropout": 0.0},
    **{"shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 24},
}
"""By all the names that families have for them; each gets those that its config has."""

SPECIAL: dict[str, dict[str, Any]] = {
    **{key: {"num_key_value_heads": 4} for key in ("axk1", "glm4_moe_lite", "minicpm3", "youtu")},
    **{key: {"bos_token_id": 1} for key in ("cwm", "modernbert-decoder")},
    "codegen": {"rotary_dim": 4},
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": zoo.BLOCKS, "max_seq_len": 128},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
FAMILIES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "codegen", "cohere2_moe"),
    *(
        "cohere_compass_text",
        "cwm",
        "dbrx",
        "diffllama",
        "doge",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma4_text",
        "glm",
    ),
    *("glm4_moe_lite", "gpt-sw3", "gpt_neox_japanese", "granite_swa", "granitemoe_swa", "granitemoeshared", "helium"),
    *("hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "mellum"),
    *("mimo_v2_flash", "minicpm3", "minimax_m3_vl_text", "ministral", "ministral3", "modernbert-decoder", "moshi"),
    *("nanochat", "nemotron", "olmo", "persimmon", "solar_open", "vaultgemma", "xglm", "youtu"),
)


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    if family == "gemma4_text":  # its default config is that of the two sizes that are refused
        return wrappers.config_of("gemma4").get_text_config()
    default = CONFIG_MAPPING[family]()
    names = {*vars(default), *type(default).attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in names}
    return AutoConfig.for_model(family, **{**sizes, **SPECIAL.get(family, {}), **changes})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_compute_what_the_whole_model_does(family, tmp_path):
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    zoo.spread_weights(model, zoo.SEED, zoo.SPREAD)
    model.save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(logits_of(tmp_path), logits_of_whole(whole))
