"""Models of random weights that only travel: nothing is computed with them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import LlamaConfig

from swarm.models.checkpoints.safetensors_header import encode_header

NAME = "benchmarks/random"
HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 2048, 5632, 256, 1024
BLOCK_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN)
"""A block has the shape of one of TinyLlama 1.1B, in bf16."""

SPARE_BYTES = 1 << 30
"""Of the drive, beyond the model and what is received of it."""


def make_random_model(folder: Path, size: float) -> Path:
    """Write a llama of about `size` bytes, in whole blocks; a small one has smaller blocks."""
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * size + SPARE_BYTES:
        raise SystemExit(f"{folder.parent} has {free / 1e9:.1f} GB free, which is too little: use --folder")
    blocks = max(2, round(size / BLOCK_BYTES))
    fitting = size / blocks / BLOCK_BYTES
    scale = 1.0 if fitting > 0.7 else 2.0 ** math.floor(math.log2(fitting) / 2)
    shapes = dict(_shapes(blocks, scale))
    folder.mkdir()
    LlamaConfig(
        hidden_size=int(HIDDEN * scale),
        intermediate_size=int(INTERMEDIATE * scale),
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    ).save_pretrained(folder)
    chance = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header((name, "BF16", shape) for name, shape in shapes.items()))
        for shape in shapes.values():
            file.write(chance.bytes(2 * math.prod(shape)))
    return folder


def _shapes(blocks: int, scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, keys = (int(one * scale) for one in (HIDDEN, INTERMEDIATE, KEYS))
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)
