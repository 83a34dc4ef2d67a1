"""Tiny models in GGUF files, as llama.cpp's converter writes them, each with the model that its weights mean.

Everything is written from the format's definition, and shares nothing with the code that reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import zoo

SIZES = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = {"moe_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16, "rope_theta": 5e5}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
    "phi3": ("phi3", {}),
    "qwen2_moe": ("qwen2moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3moe", {**EXPERTS, "norm_topk_prob": True}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3", {}),
    "gpt_oss": ("gpt-oss", {"intermediate_size": 32, "original_max_position_embeddings": 4096}),
    "qwen3_5_text": ("qwen35", {"full_attention_interval": 3, "head_dim": 32, "rope_parameters": MROPE}),
    "qwen3_5_moe_text": ("qwen35moe", {"full_attention_interval": 3, "head_dim": 32, "rope_parameters": MROPE}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
}
"""For each family, GGUF's name of it, and what of the zoo's config is changed to what files say."""

BY_TRANSFORMERS = ("qwen3_5_text", "qwen3_5_moe_text", "lfm2")
"""Those that transformers reads without another package."""

Packed = tuple[int, bytes, torch.Tensor]
"""The number of the type, the bytes, and the values that they mean."""

Tensor = tuple[int, tuple[int, ...], bytes]
"""The number of the type, the shape in torch's order, and the bytes."""

Tensors = dict[str, Tensor]
Edit = Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]


def plain(number: int, dtype: torch.dtype) -> Callable[[torch.Tensor], Packed]:
    def pack(tensor: torch.Tensor) -> Packed:
        stored = tensor.to(dtype).contiguous()
        return number, stored.view(torch.uint8).numpy().tobytes(), stored.float()

    return pack


def blocks(number: int, bits: int, has_minimum: bool) -> Callable[[torch.Tensor], Packed]:
    """Integers in blocks of 32, each with a scale and perhaps a minimum in float16."""

    def pack(tensor: torch.Tensor) -> Packed:
        data, meant = b"", []
        middle = 0 if has_minimum or bits == 8 else 1 << (bits - 1)
        for block in tensor.reshape(-1, 32):
            least = block.min().half().float() if has_minimum else torch.tensor(0.0)
            top = (1 << bits) - 1 if has_minimum else (1 << (bits - 1)) - 1
            scale = ((block - least).abs().max() / top).half().float()
            steps = ((block - least) / scale).round().nan_to_num().clamp(-top if not has_minimum else 0, top)
            meant.append(steps * scale + least)
            codes = [int(step) + middle for step in steps]
            data += struct.pack("<e", scale) + (struct.pack("<e", least) if has_minimum else b"")
            if bits == 8:
                data += struct.pack("32b", *codes)
                continue
            if bits == 5:
                data += struct.pack("<I", sum((code >> 4) << place for place, code in enumerate(codes)))
            data += bytes(low & 15 | (high & 15) << 4 for low, high in zip(codes[:16], codes[16:], strict=True))
        return number, data, torch.stack(meant).view(tensor.shape)

    return pack


def mxfp4(tensor: torch.Tensor) -> Packed:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    data, meant = b"", []
    for block in tensor.reshape(-1, 32):
        exponent = 127 - 5
        steps = [min(range(8), key=lambda one: abs(values[one] - abs(x) * 32)) for x in block.tolist()]
        codes = [step | (8 if x < 0 else 0) for step, x in zip(steps, block.tolist(), strict=True)]
        meant.append([values[code & 7] / 32 * (-1 if code & 8 else 1) for code in codes])
        data += bytes([exponent, *(low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True))])
    return 39, data, torch.tensor(meant).view(tensor.shape)


TYPES: dict[str, Callable[[torch.Tensor], Packed]] = {
    "F32": plain(0, torch.float32),
    "F16": plain(1, torch.float16),
    "BF16": plain(30, torch.bfloat16),
    "Q4_0": blocks(2, 4, False),
    "Q4_1": blocks(3, 4, True),
    "Q5_0": blocks(6, 5, False),
    "Q5_1": blocks(7, 5, True),
    "Q8_0": blocks(8, 8, False),
    "MXFP4": mxfp4,
}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv"},
    **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks.weight"},
    **{"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "operator_norm": "attn_norm"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{"feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down"},
    **{f"conv.{one}": f"shortconv.{one}" for one in ("in_proj", "out_proj", "conv")},
    **{"mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp"},
    **{"mlp.shared_expert_gate": "ffn_gate_inp_shexp", "input_layernorm": "attn_norm"},
    **{f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    **{"post_attention_layernorm": "ffn_norm", "ffn_norm": "ffn_norm"},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    **{f"linear_attn.{one}": f"ssm_{one}" for one in ("conv1d", "norm")},
    **{"linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"},
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHERS = {
    **{"gpt_oss": {"post_attention_layernorm": "post_attention_norm"}, "gemma2": GEMMA, "gemma3_text": GEMMA},
    **{one: {"post_attention_layernorm": "post_attention_norm"} for one in ("qwen3_5_text", "qwen3_5_moe_text")},
}
"""What some families name otherwise."""


def gguf_name(family: str, name: str) -> str:
    parts = name.split(".")
    begin = f"blk.{parts[2]}." if name.startswith("model.layers.") else ""
    stem = ".".join(parts[3:]) if begin else name
    names = NAMES | OTHERS.get(family, {})
    if stem in names:
        return begin + names[stem]
    stem, _, last = stem.rpartition(".")
    return f"{begin}{names[stem]}.{last}"


def converted(family: str, name: str, tensor: torch.Tensor, heads: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """One tensor of transformers as the converter writes it, by GGUF's names."""
    block = ".".join(("blk", name.split(".")[2])) if name.startswith("model.layers.") else ""
    part = name.rpartition("mlp.experts.")[2]
    if part.startswith("gate_up_proj"):
        last = "bias" if part.endswith("bias") else "weight"
        if family == "gpt_oss":  # turns of gate and up, in columns
            gate, up = tensor[..., ::2], tensor[..., 1::2]
            gate, up = (one.mT if last == "weight" else one for one in (gate, up))
        else:
            gate, up = tensor.chunk(2, dim=1)
        return {f"{block}.ffn_gate_exps.{last}": gate, f"{block}.ffn_up_exps.{last}": up}
    if part.startswith("down_proj"):
        if part.endswith("bias"):
            return {f"{block}.ffn_down_exps.bias": tensor}
        return {f"{block}.ffn_down_exps.weight": tensor.mT if family == "gpt_oss" else tensor}
    for role, count in heads.items():
        if family == "llama" and f".{role}_proj." in name:
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if family.startswith(("gemma", "qwen3_5")) and name.endswith("norm.weight"):
        tensor = tensor if "linear_attn" in name else tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith((".conv.weight", "conv1d.weight", "shared_expert_gate.weight")):
        tensor = tensor.squeeze(1 if "conv" in name else 0)
    return {gguf_name(family, name): tensor}


def make(
    family: str,
    path: Path,
    kind: str = "Q8_0",
    splits: int = 1,
    config: Mapping[str, Any] | None = None,
    edit: Edit = lambda said, tensors: (said, tensors),
) -> PreTrainedModel:
    """Write a tiny model, and return the one that the weights in the file mean.

    Weights are of type `kind` where a row has whole blocks. `qwen3_5` is not what they mean: its heads are not
    reordered.

    Args:
        edit: changes metadata and tensors before they are written.
    """
    architecture, changes = FAMILIES[family]
    model = zoo.make_model(family, **{**SIZES, **changes, **(config or {})})
    tensors: Tensors = {}
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    is_tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        # Rows are rounded in blocks, and the converter only turns, splits and reorders them.
        is_turned = family == "gpt_oss" and tensor.ndim == 3
        rows = tensor.mT if is_turned else tensor
        is_packed = tensor.ndim > 1 and rows.shape[-1] % 32 == 0 and "conv." not in name and "bias" not in name
        pack = TYPES[kind if is_packed else "F32"]
        for one, value in converted(family, name, tensor, heads).items():
            number, data, _ = pack(value)
            tensors[one] = (number, tuple(value.shape), data)
        if is_packed:
            meant = pack(rows)[2]
            tensor.copy_(meant.mT if is_turned else meant)
    rope = model.config.rope_parameters
    for name in ("long_factor", "short_factor"):
        if name in rope:
            tensors[f"rope_factors_{name[:-7]}.weight"] = numbers(rope[name])
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
        plain = rope["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
        tensors["rope_freqs.weight"] = numbers((plain / scaled).tolist())
    said, tensors = edit(metadata(family, architecture, model.config), tensors)
    write(path, said, tensors, splits)
    return model


def numbers(values: Sequence[float]) -> Tensor:
    return 0, (len(values),), struct.pack(f"<{len(values)}f", *values)


def metadata(family: str, architecture: str, config: Any) -> dict[str, Any]:
    """What the converter writes of a config, and a tokenizer with a token for each character of ASCII."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
    }
    if family in ("phi3", "gemma2", "gemma3_text", "gpt_oss"):
        said["attention.sliding_window"] = config.sliding_window
    if hasattr(config, "num_experts_per_tok"):
        said["expert_count"] = getattr(config, "num_experts", None) or config.num_local_experts
        said["expert_used_count"] = config.num_experts_per_tok
        said["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
        said["expert_shared_feed_forward_length"] = getattr(config, "shared_expert_intermediate_size", 0)
    if family == "gemma2":
        said["attn_logit_softcapping"] = config.attn_logit_softcapping
        said["final_logit_softcapping"] = config.final_logit_softcapping
    if family == "gemma3_text":
        said["attention.sliding_window_pattern"] = 3
        said["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] == "longrope":
        said |= {"rope.scaling.attn_factor": rope["attention_factor"]}
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "linear":
        said["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        said |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if family.startswith("qwen3_5"):
        said |= {"full_attention_interval": 3, "ssm.conv_kernel": config.linear_conv_kernel_dim}
        said |= {"ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads}
        said["ssm.time_step_rank"] = config.linear_num_value_heads
        said["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        said["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if family == "lfm2":
        is_full = [kind == "full_attention" for kind in config.layer_types]
        said["attention.head_count_kv"] = [config.num_key_value_heads if one else 0 for one in is_full]
        said["shortconv.l_cache"] = config.conv_L_cache
    alphabet = bytes_to_unicode()
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in said.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [alphabet[code] for code in range(zoo.VOCABULARY)],
        "tokenizer.ggml.token_type": [1] * zoo.VOCABULARY,
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def write(path: Path, said: Mapping[str, Any], tensors: Tensors, splits: int = 1) -> None:
    """Write a model in one file, or in several that are named like `path` with their numbers."""
    names = list(tensors)
    for number in range(splits):
        part = {name: tensors[name] for name in names[number::splits]}
        entries = dict(said) if number == 0 else {"general.architecture": said["general.architecture"]}
        if splits > 1:
            entries |= {"split.no": number, "split.count": splits, "split.tensors.count": len(tensors)}
        file = path if splits == 1 else path.with_name(f"{path.stem}-{number + 1:05}-of-{splits:05}.gguf")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(entries, part))


def encoded(said: Mapping[str, Any], tensors: Tensors, alignment: int = 32) -> bytes:
    """A file's bytes."""
    header, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(said)), b""
    for key, value in said.items():
        header += text(key) + entry(value)
    for name, (number, shape, packed) in tensors.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += text(name) + dimensions + struct.pack("<IQ", number, len(data))
        data += packed + bytes(-len(packed) % alignment)
    return header + bytes(-len(header) % alignment) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(value: Any) -> bytes:
    """A value with the number of its type."""
    if isinstance(value, list):
        inner = [entry(one) for one in value] or [entry("")[:4]]
        return struct.pack("<I", 9) + inner[0][:4] + struct.pack("<Q", len(value)) + b"".join(one[4:] for one in inner)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    number, form = (7, "?") if isinstance(value, bool) else (6, "f") if isinstance(value, float) else (4, "I")
    return struct.pack(f"<I{form}", number, value)


def transformers_load(path: Path) -> PreTrainedModel:
    """What transformers makes of a file, of an architecture for which it needs no package."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model
