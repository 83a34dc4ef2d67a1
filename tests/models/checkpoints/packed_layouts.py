"""Tiny checkpoints in the layouts of packed weights that are published, each with what its weights mean.

Everything is written from the formats' definitions, number by number, and shares nothing with the code that reads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swarm.models.checkpoints.checkpoint import SINGLE_FILE
from tests import zoo

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
MORE_SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "mlp_only_layers": [0]},
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 32,
    },
}
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
E4M3, UINT8 = torch.float8_e4m3fn, torch.uint8


@dataclass
class Drawn:
    """Random numbers for one weight [out, in], of about the size that the weights of the tests have."""

    shape: tuple[int, int]
    generator: torch.Generator

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or self.shape, generator=self.generator)

    def scales(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 0.01) -> torch.Tensor:
        return ((torch.rand(shape, generator=self.generator) + 0.5) * size).to(dtype)

    def fp8(self) -> torch.Tensor:
        return (torch.randn(self.shape, generator=self.generator) * 8).to(E4M3)


Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors by what their names have in place of "weight", and the dense weight in float32."""


def words(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row as one long number, its lowest bits first, in words of 32 bits."""
    rows = []
    for row in integers.tolist():
        number = sum(value << (place * bits) for place, value in enumerate(row))
        size = -(-len(row) * bits // 32)
        rows.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(size)])
    return torch.tensor(rows).to(torch.uint32).view(torch.int32)


def spread(scales: torch.Tensor, rows: int, columns: int, shape: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks, for each element."""
    return scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8_blocks(name: str, block: int = 128, dtype: torch.dtype = torch.float32) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        values = drawn.fp8()
        scales = drawn.scales(*(-(-size // block) for size in drawn.shape), dtype=dtype)
        return {"weight": values, name: scales}, values.float() * spread(scales, block, block, drawn.shape)

    return pack


def fp8_whole(scale: str, *activations: str, shape: tuple[int, ...] = ()) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        values, scales = drawn.fp8(), drawn.scales(*shape)
        others = {name: torch.tensor(0.5) for name in activations}
        return {"weight": values, scale: scales, **others}, values.float() * scales.reshape(1)

    return pack


def fp8_channels(dtype: torch.dtype) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        values, scales = drawn.fp8(), drawn.scales(drawn.shape[0], 1, dtype=dtype)
        return {"weight": values, "weight_scale": scales}, values.float() * scales.float()

    return pack


def rounded(pack: Callable[[Drawn], Packed], dtype: torch.dtype = torch.bfloat16) -> Callable[[Drawn], Packed]:
    """As the library of compressed-tensors computes it, which rounds to the dtype of the scales."""

    def packed(drawn: Drawn) -> Packed:
        stored, dense = pack(drawn)
        return stored, dense.to(dtype).float()

    return packed


def mxfp8(name: str) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        values, exponents = drawn.fp8(), drawn.integers(118, 123, drawn.shape[0], drawn.shape[1] // 32)
        scales = torch.pow(2.0, exponents - 127)
        return {"weight": values, name: exponents.to(UINT8)}, values.float() * spread(scales, 1, 32, drawn.shape)

    return pack


def fp8_exponents(drawn: Drawn) -> Packed:
    """Blocks of FP8 whose scales are powers of two in a dtype of their own, named as in DeepSeek-V4."""
    values, exponents = drawn.fp8(), drawn.integers(118, 123, -(-drawn.shape[0] // 128), -(-drawn.shape[1] // 128))
    dense = values.float() * spread(torch.pow(2.0, exponents - 127), 128, 128, drawn.shape)
    return {"weight": values, "scale": exponents.to(UINT8).view(torch.float8_e8m0fnu)}, dense


def _fp4(drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    codes = drawn.integers(0, 16)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(UINT8), FP4_VALUES[codes]


def nvfp4_compressed(drawn: Drawn) -> Packed:
    data, values = _fp4(drawn)
    scales, divisor = drawn.scales(drawn.shape[0], drawn.shape[1] // 16, dtype=E4M3, size=30), torch.tensor([400.0])
    dense = values * (spread(scales, 1, 16, drawn.shape) / divisor)
    others = {"weight_global_scale": divisor, "input_global_scale": torch.tensor([3.0])}
    return {"weight_packed": data, "weight_scale": scales, **others}, dense.bfloat16().float()


def nvfp4_modelopt(drawn: Drawn) -> Packed:
    data, values = _fp4(drawn)
    scales, factor = drawn.scales(drawn.shape[0], drawn.shape[1] // 16, dtype=E4M3, size=30), torch.tensor(0.0017)
    dense = values * (spread(scales, 1, 16, drawn.shape) * factor)
    others = {"weight_scale_2": factor, "input_scale": torch.tensor(0.01)}
    return {"weight": data, "weight_scale": scales, **others}, dense


def mxfp4_compressed(drawn: Drawn) -> Packed:
    data, values = _fp4(drawn)
    exponents = drawn.integers(122, 126, drawn.shape[0], drawn.shape[1] // 32)
    scales = torch.pow(2.0, exponents - 127)
    packed = {"weight_packed": data, "weight_scale": exponents.to(UINT8)}
    return packed, values * spread(scales, 1, 32, drawn.shape)


def packed_integers(bits: int, group: int | None, has_zeros: bool = False) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        rows, columns = drawn.shape
        width = group or columns
        values, scales = drawn.integers(0, 1 << bits), drawn.scales(rows, columns // width, dtype=torch.bfloat16)
        zeros = (
            drawn.integers(0, 1 << bits, rows, columns // width)
            if has_zeros
            else torch.full((rows, columns // width), 1 << (bits - 1))
        )
        dense = (values - spread(zeros, 1, width, drawn.shape)) * spread(scales, 1, width, drawn.shape)
        packed = {
            "weight_packed": words(values, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(drawn.shape),
        }
        if has_zeros:
            packed["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return packed, dense.bfloat16().float()

    return pack


def int8_channels(drawn: Drawn) -> Packed:
    values, scales = drawn.integers(-128, 128), drawn.scales(drawn.shape[0], 1, dtype=torch.bfloat16, size=0.001)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, (values * scales.float()).bfloat16().float()


def awq(drawn: Drawn) -> Packed:
    rows, columns = drawn.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # a word of AWQ holds these of eight columns of [in, out], lowest bits first
    places = [start + one for start in range(0, rows, 8) for one in order]
    values, zeros = drawn.integers(0, 16), drawn.integers(0, 16, columns // 64, rows)
    scales = drawn.scales(columns // 64, rows, dtype=torch.float16)
    packed = {"qweight": words(values.T[:, places], 4), "qzeros": words(zeros[:, places], 4), "scales": scales}
    return packed, (values - spread(zeros.T, 1, 64, drawn.shape)) * spread(scales.T, 1, 64, drawn.shape)


def gptq(bits: int, is_ordered: bool = True, offset: int = 1) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        rows, columns = drawn.shape
        values, zeros = drawn.integers(0, 1 << bits), drawn.integers(1, 1 << bits, columns // 32, rows)
        scales = drawn.scales(columns // 32, rows, dtype=torch.float16)
        group = torch.arange(columns) // 32
        if not is_ordered:
            group = group[torch.randperm(columns, generator=drawn.generator)]
        packed = {
            "qweight": words(values, bits).T.contiguous(),
            "qzeros": words(zeros - offset, bits),
            "scales": scales,
        }
        dense = (values - zeros.T[:, group]) * scales.float().T[:, group]
        return {**packed, "g_idx": group.to(torch.int32), "bias": torch.zeros(rows)}, dense

    return pack


def mlx(bits: int) -> Callable[[Drawn], Packed]:
    def pack(drawn: Drawn) -> Packed:
        shape = (drawn.shape[0], drawn.shape[1] // 64)
        values, scales, biases = drawn.integers(0, 1 << bits), drawn.scales(*shape), -drawn.scales(*shape, size=0.1)
        dense = values * spread(scales, 1, 64, drawn.shape) + spread(biases, 1, 64, drawn.shape)
        return {"weight": words(values, bits).view(torch.uint32), "scales": scales, "biases": biases}, dense

    return pack


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    scheme = {"symmetric": True, "dynamic": False, "type": "int", **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": False}

LAYOUTS: Mapping[str, tuple[Mapping[str, Any] | None, Callable[[Drawn], Packed]]] = {
    "fp8 blocks": (BLOCKS, fp8_blocks("weight_scale_inv")),
    "fp8 blocks without a config": (None, fp8_blocks("weight_scale_inv")),
    "fp8 blocks of 32": ({**BLOCKS, "weight_block_size": [32, 32]}, fp8_blocks("weight_scale_inv", 32)),
    "fp8 blocks with exponents": ({**BLOCKS, "scale_fmt": "ue8m0"}, fp8_exponents),
    "fp8 whole tensors": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_whole("weight_scale_inv", "activation_scale"),
    ),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_whole("weight_scale", "input_scale", shape=(1,)),
    ),
    "ModelOpt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}},
        fp8_whole("weight_scale", "input_scale", "k_scale", "v_scale"),
    ),
    "ModelOpt FP8 without a config": (None, fp8_whole("weight_scale", "input_scale")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channels(torch.float32)),
    "MXFP8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        mxfp8("weight_scale_inv"),
    ),
    "compressed-tensors fp8": (compressed("float-quantized", **CHANNEL), rounded(fp8_channels(torch.bfloat16))),
    "compressed-tensors fp8 with float32": (compressed("float-quantized", **CHANNEL), fp8_channels(torch.float32)),
    "compressed-tensors fp8 blocks": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        fp8_blocks("weight_scale"),
    ),
    "compressed-tensors int4": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        packed_integers(4, 32),
    ),
    "compressed-tensors int4 with zeros": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        packed_integers(4, 64, has_zeros=True),
    ),
    "compressed-tensors int8": (compressed("pack-quantized", num_bits=8, strategy="channel"), packed_integers(8, None)),
    "compressed-tensors W8A8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8_channels),
    "compressed-tensors NVFP4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4_compressed,
    ),
    "compressed-tensors MXFP4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4_compressed,
    ),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq),
    "GPTQ": ({**GPTQ, "bits": 4}, gptq(4)),
    "GPTQ desc_act": ({**GPTQ, "bits": 4, "desc_act": True}, gptq(4, is_ordered=False)),
    "GPTQ v2": ({**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, offset=0)),
    "GPTQ 2": ({**GPTQ, "bits": 2}, gptq(2)),
    "GPTQ 3": ({**GPTQ, "bits": 3}, gptq(3)),
    "GPTQ 8": ({**GPTQ, "bits": 8}, gptq(8)),
    "MLX 4": ({"group_size": 64, "bits": 4}, mlx(4)),
    "MLX 6": ({"group_size": 64, "bits": 6, "mode": "affine"}, mlx(6)),
    "MLX 8": ({"group_size": 64, "bits": 8}, mlx(8)),
}


def make(layout: str, folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A checkpoint of this layout, and the same model with plain weights in `dtype`."""
    quantization, pack = LAYOUTS[layout]
    plain, packed = folder / "plain", folder / "packed"
    zoo.make_model(family, **{**SIZES, **MORE_SIZES.get(family, {})}).to(dtype).save_pretrained(plain)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / SINGLE_FILE)
    dense, stored = dict(tensors), dict(tensors)
    for seed, (name, weight) in enumerate(sorted(tensors.items())):
        is_linear = weight.ndim == 2 and ".layers." in name and "mlp.gate.weight" not in name
        if is_linear or (layout.startswith("MLX") and weight.ndim == 2):
            found, dense[name] = pack(Drawn(tuple(weight.shape), torch.Generator().manual_seed(seed)))
            del stored[name]
            stored |= {name.removesuffix("weight") + ending: one.clone() for ending, one in found.items()}
    save_file({name: one.to(dtype) for name, one in dense.items()}, plain / SINGLE_FILE, {"format": "pt"})
    save_file(stored, packed / SINGLE_FILE, {"format": "pt"})
    keys = ("quantization_config", "quantization") if layout.startswith("MLX") else ("quantization_config",)
    if quantization is not None:
        change_config(packed, **dict.fromkeys(keys, quantization))
    if layout == "ModelOpt FP8 without a config":
        (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    return packed, plain


def make_mxfp4(folder: Path, dtype: torch.dtype) -> Path:
    """A gpt_oss whose experts are packed as MXFP4."""
    model = zoo.make_model("gpt_oss", **{**SIZES, "layer_types": ["sliding_attention", "full_attention"]})
    model.to(dtype).save_pretrained(folder)
    return pack_mxfp4(folder)


def pack_mxfp4(folder: Path) -> Path:
    """Replace the experts of a gpt_oss by packed ones."""
    tensors = load_file(folder / SINGLE_FILE)
    generator = torch.Generator().manual_seed(1)
    for name in [one for one in tensors if one.endswith("experts.gate_up_proj") or one.endswith("experts.down_proj")]:
        experts, rows, columns = tensors.pop(name).shape
        shape = (experts, columns, rows // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(UINT8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator).to(UINT8)
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
