"""The default wire format of hidden states for each model family: what the calibration in `docs/wire.md` allows."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from swarm.data_structures import WireFormat

CALIBRATION_HOPS = 3
MAX_PERPLEXITY_CHANGE_PERCENT = 0.5
OUTLIER_FACTOR = 20.0
"""A family may use 8 bits if, over `CALIBRATION_HOPS` servers, they change the perplexity by less than
`MAX_PERPLEXITY_CHANGE_PERCENT`, two standard errors included. This must also hold if some channels of every block are
`OUTLIER_FACTOR` times as large, which is how far those of large models stand out (Dettmers et al. 2022a, LLM.int8)."""

BLOCKWISE8_FAMILIES = frozenset(
    {
        *("bloom", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text"),
        *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "llama4_text"),
        *("mistral", "mixtral", "mpt", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Families whose hidden states travel in 8 bits, because they passed the calibration. See `docs/wire.md`."""


def default_wire_format(config: PreTrainedConfig, trains: bool = False) -> WireFormat:
    """The wire format for a model: 8 bits where they are harmless for its family, otherwise 16 bits.

    Training uses 16 bits: rounding the inputs of the blocks harms gradients more than it harms texts
    (docs/fine-tuning.md).

    The 16-bit format is the checkpoint's own, so that nothing is lost if servers compute in it. A float32 checkpoint
    gets bfloat16: float16 is more precise, but it ends at 65504, and how large hidden states become is not known before
    they are computed.
    """
    if config.model_type in BLOCKWISE8_FAMILIES and not trains:
        return WireFormat.BLOCKWISE8
    stored = getattr(config, "dtype", None)
    return WireFormat.FLOAT16 if stored in (torch.float16, "float16") else WireFormat.BFLOAT16
