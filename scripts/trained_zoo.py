"""Trains small models of many families for a minute or so, so that their hidden states are no longer random.

The configs are those of the tests' zoo, made wider. Training is seeded and counted in steps; a folder that holds a
trained model already is taken as it is.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from scripts.train_demo_model import learning_rate
from tests.zoo import HYBRIDS, TABLE

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox"),
    *("opt", "bloom", "falcon", "mixtral", "qwen2_moe", "qwen3_moe", "olmo2", "starcoder2", "stablelm", "granite"),
    *("cohere", "smollm3", "gpt_oss", "glm4", "deepseek_v3", "gptj", "gpt_bigcode", "mpt", "deepseek_v2"),
    *("glm4_moe", "olmo3", "exaone4", "seed_oss", "ernie4_5", "llama4_text", "cohere2", "hunyuan_v1_dense"),
)
"""The most popular families come first, for a run without time for all of them."""

HIDDEN, CONTEXT, ROWS = 128, 128, 8
WIDER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "ffn_dim": 512,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "window_size": 64,
    "attention_chunk_size": 64,
    "rotary_dim": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
}
LEARNING_RATE = 2e-3
WIDE_LEARNING_RATE = 5e-4


def config_of(family: str, vocabulary: int, hidden: int = HIDDEN) -> PreTrainedConfig:
    """Six blocks, or four if it is wider than usual; for families with plain attention then."""
    narrow, wider = {**TABLE, **HYBRIDS}[family], WIDER
    if hidden != HIDDEN:
        size = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "head_dim": 64}
        wider = {**WIDER, **size, "num_attention_heads": hidden // 64, "num_hidden_layers": 4}
    wider = {name: value for name, value in wider.items() if name in narrow}
    return AutoConfig.for_model(family, **{**narrow, **wider, "vocab_size": vocabulary})


def trained(
    family: str, folder: Path, texts: Sequence[Tensor], vocabulary: int, steps: int, seed: int, hidden: int = HIDDEN
) -> Path:
    """The folder of the trained model, `folder`/`family`, or `folder`/`family`-1024 for one of hidden size 1024.

    Args:
        texts: token ids to train on, one tensor a text.
        steps: 0 leaves the weights as they are drawn.
    """
    done = folder / (f"{family}-{hidden}" if hidden != HIDDEN else family)
    if not done.exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family, vocabulary, hidden), dtype=torch.float32)
        _train(model, texts, steps, seed, LEARNING_RATE if hidden == HIDDEN else WIDE_LEARNING_RATE)
        half = folder / f"{done.name}.tmp"
        shutil.rmtree(half, ignore_errors=True)
        model.save_pretrained(half)
        os.replace(half, done)
    return done


def _train(model: Any, texts: Sequence[Tensor], steps: int, seed: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw = random.Random(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, step / steps, rate)
        batch = _batch(texts, draw)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        torch.autograd.backward(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _batch(texts: Sequence[Tensor], draw: random.Random) -> Tensor:
    """`[ROWS, CONTEXT + 1]` token ids from random places, long texts more often."""
    sources = draw.choices(texts, [len(ids) for ids in texts], k=ROWS)
    starts = [draw.randrange(len(ids) - CONTEXT) for ids in sources]
    return torch.stack([ids[start : start + CONTEXT + 1] for ids, start in zip(sources, starts, strict=True)])
