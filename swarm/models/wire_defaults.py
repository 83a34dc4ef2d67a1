"""How hidden states travel unless somebody says otherwise: what the calibration in `docs/wire.md` found harmless."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from swarm.data_structures import WireFormat

HOPS, HARMLESS, OUTLIERS = 3, 0.5, 20.0
"""The rule: over `HOPS` servers, 8 bits change the perplexity by less than `HARMLESS` percent, two standard errors
included; also where some channels of every block are `OUTLIERS` times as large, which is how far those of large models
stand out (Dettmers et al. 2022a, LLM.int8)."""

BLOCKWISE8 = frozenset(
    {
        *("bloom", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text"),
        *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "llama4_text"),
        *("mistral", "mixtral", "mpt", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Families whose hidden states travel in 8 bits: those that keep the rule. `docs/wire.md` has the figures."""


def default_wire(config: PreTrainedConfig, trains: bool = False) -> WireFormat:
    """The format for a model: 8 bits where that was measured to be harmless for its family, else 16.

    Training takes 16: the rounding of what went into the blocks spoils gradients more than texts (docs/fine-tuning.md).

    The 16 bits are those of the checkpoint, so that nothing is lost where servers compute in them. A float32 checkpoint
    gets bfloat16: float16 is finer, but ends at 65504, and how large hidden states become shows only when they do.
    """
    if config.model_type in BLOCKWISE8 and not trains:
        return WireFormat.BLOCKWISE8
    stored = getattr(config, "dtype", None)
    return WireFormat.FLOAT16 if stored in (torch.float16, "float16") else WireFormat.BFLOAT16
