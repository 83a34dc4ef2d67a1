"""The config of the model in a GGUF file, from what the file says of it.

transformers has this for the architectures that its own reader covers. For the others it needs another package, and
takes the defaults of a family for much that files say (the width of heads and experts, scaled rotary positions), so
these are here. What is said that is not known to be computed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarm.common.files.gguf_header import ARCHITECTURE, GgufTensor
from swarm.models.checkpoints.config_limits import MAX_BLOCKS

FAMILIES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"},
    **{"gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3", "gpt-oss": "gpt_oss"},
}
"""The family of each architecture of GGUF that is read, beside those that transformers describes."""

ARCHITECTURES = (*FAMILIES, *GGUF_CONFIG_ARCHS)

_UNREAD = (
    *("embedding_scale", "residual_scale", "logit_scale", "attention.scale", "attention.clamp_kqv"),
    *("attention.max_alibi_bias", "attention.temperature_length", "attention.temperature_scale"),
    *("expert_weights_scale", "expert_gating_func", "expert_group_count", "rope.scaling.yarn_log_multiplier"),
    "rope.scale_linear",
)
"""What changes a model unless it is 0 or 1, and is in no file of the families above."""

_SLIDING = ("gemma2", "gemma3", "gpt-oss", "phi3")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1, 3.2 and 3.3. A file only holds the numbers that follow from them."""


class _Said:
    """What a file says of its architecture. A key that is missing, or absurd, is a `ValueError`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata, self.architecture = metadata, str(metadata[ARCHITECTURE])

    def __call__(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise ValueError(f"{self.architecture}.{key} is missing")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.architecture}.{key}", default)


def described_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], values: Callable[[str], list[float]]
) -> dict[str, Any]:
    """The config, as `config.json` would have it. Raises anything if the file is malformed.

    Args:
        values: reads a small tensor.
    """
    said = _Said(metadata)
    if not 1 <= said("block_count") <= MAX_BLOCKS:
        raise ValueError(f"it has {said('block_count')} blocks, of which {MAX_BLOCKS} are allowed")
    if said.architecture in GGUF_CONFIG_ARCHS:
        config: dict[str, Any] = get_gguf_config(dict(metadata), tuple(tensors))
    else:
        config = _described(said, tensors, values)
    ends = [metadata.get(f"tokenizer.ggml.{one}_token_id") for one in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(one for one in ends if one is not None)) or None
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        config[name] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _described(said: _Said, tensors: Mapping[str, GgufTensor], values: Callable[[str], list[float]]) -> dict[str, Any]:
    architecture = said.architecture
    for key in _UNREAD:
        if said.get(key, 0) not in (0, 1):
            raise ValueError(f"{architecture}.{key} is {str(said(key))[:32]}, which is not read from GGUF")
    if architecture == "llama" and said.get("expert_count", 0):
        raise ValueError("it is a mixture of experts of the architecture llama, which is not read from GGUF")
    heads, hidden = said("attention.head_count"), said("embedding_length")
    width = said.get("attention.key_length", hidden // heads)
    if said.get("attention.value_length", width) != width:
        raise ValueError("its keys and values differ in size, which is not read from GGUF")
    config = {
        "model_type": FAMILIES[architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": said.get("feed_forward_length") or said("expert_feed_forward_length"),
        "num_hidden_layers": said("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "head_dim": width,
        "max_position_embeddings": said("context_length"),
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(said, width, tensors, values),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    original = said.get("rope.scaling.original_context_length")
    if architecture == "phi3" and original is not None:  # which takes it from here
        config["original_max_position_embeddings"] = original
    window = said.get("attention.sliding_window")
    if architecture in _SLIDING:
        config["sliding_window"] = said("attention.sliding_window") if architecture != "phi3" else window
    elif window is not None and window < said("context_length"):
        raise ValueError(f"its layers see {window} positions, which is not read from GGUF for {architecture}")
    if said.get("expert_count"):
        config |= _experts(said)
    if architecture.startswith("gemma"):
        config |= _gemma(said, hidden, heads, width)
    return config


def _experts(said: _Said) -> dict[str, Any]:
    config: dict[str, Any] = {"num_experts_per_tok": said("expert_used_count")}
    if said.architecture == "gpt-oss":
        return config | {
            "num_local_experts": said("expert_count"),
            "intermediate_size": said("expert_feed_forward_length"),
        }
    config |= {"num_experts": said("expert_count"), "moe_intermediate_size": said("expert_feed_forward_length")}
    if said.architecture == "qwen2moe":
        return config | {"shared_expert_intermediate_size": said("expert_shared_feed_forward_length")}
    return config | {"norm_topk_prob": True}


def _gemma(said: _Said, hidden: int, heads: int, width: int) -> dict[str, Any]:
    # Files do not say how queries are scaled: in the 27B of both families it is as if heads were as wide as this.
    is_27b = said("block_count") == (46 if said.architecture == "gemma2" else 62)
    config: dict[str, Any] = {"query_pre_attn_scalar": hidden // heads if is_27b else width}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := said.get(name)) is not None:
            config[name] = cap
    if said.architecture == "gemma3":
        every = said.get("attention.sliding_window_pattern", 6)
        last = [(block + 1) % every == 0 for block in range(said("block_count"))]
        config["layer_types"] = ["full_attention" if one else "sliding_attention" for one in last]
    return config


def _rope(
    said: _Said, width: int, tensors: Mapping[str, GgufTensor], values: Callable[[str], list[float]]
) -> dict[str, Any]:
    """How rotary positions are computed, as transformers describes it."""
    base = said.get("rope.freq_base", 10000.0)
    kind, factor = said.get("rope.scaling.type", "linear"), said.get("rope.scaling.factor") or 1.0
    original = said.get("rope.scaling.original_context_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    share = said.get("rope.dimension_count", width) / width
    if share != 1 and said.architecture != "phi3":
        raise ValueError("only a part of each head is turned, which is not read from GGUF for this architecture")
    if "rope_factors_long.weight" in tensors:
        long, short = (values(f"rope_factors_{one}.weight") for one in ("long", "short"))
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short, "factor": None}
        rope["original_max_position_embeddings"] = original
        rope["factor"] = said("context_length") / original
        if (attention := said.get("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif "rope_freqs.weight" in tensors:
        rope |= _llama3(base, width, values("rope_freqs.weight"))
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope["truncate"] = said.architecture != "gpt-oss"
    elif kind == "linear":  # also where only the factor is named
        rope |= {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ValueError(f"its rotary positions are scaled by {str(kind)[:32]!r}, which is not read from GGUF")
    if share != 1:
        rope["partial_rotary_factor"] = share
    if said.architecture != "gemma3":
        return rope
    local = said.get("rope.freq_base_swa", 10000.0)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _llama3(base: float, width: int, found: list[float]) -> dict[str, Any]:
    """The settings from which the divisors of rotary frequencies follow."""
    if all(one == 1 for one in found):
        return {}
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": round(max(found), 3), **_LLAMA3}
    config = LlamaConfig(rope_parameters=rope, head_dim=width, max_position_embeddings=1)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = base ** -(torch.arange(0, width, 2).float() / width)
    if len(found) != len(scaled) or not torch.allclose(plain / scaled, torch.tensor(found), rtol=1e-3):
        raise ValueError("its rotary frequencies are scaled in an unknown way: put the model's config.json beside it")
    return rope
