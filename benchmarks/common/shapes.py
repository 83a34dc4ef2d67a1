"""Models of fixed shapes with random weights, the same in every run, and how servers divide their blocks."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=8192,
    ),
    "small": LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=8192,
    ),
    # Four blocks of the size of those of an 8B model.
    "wide": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=8192,
    ),
    # As "small", but three of four layers keep a state.
    "hybrid": Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=8192,
        max_position_embeddings=8192,
    ),
}


def make_model(shape: str, folder: Path) -> Path:
    """Save a model of the shape with random fp32 weights that never generates an end-of-text token."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / shape)
    return folder / shape


def split_blocks(blocks: int, servers: int) -> list[str]:
    """`--blocks` of each server, divided as evenly as possible."""
    edges = [round(blocks * number / servers) for number in range(servers + 1)]
    return [f"{start}:{end}" for start, end in itertools.pairwise(edges)]
