"""The packed weights of a checkpoint: FP8, MXFP8, MXFP4, NVFP4, int8, int4, AWQ, GPTQ and MLX.

The names, dtypes and shapes of the tensors say how a weight is packed, so a config that was changed or left out makes
no difference; it is asked only for what tensors do not show, such as the size of blocks. What no rule takes is refused.
Scales of activations and of caches are not applied: hidden states are computed in the dtype of the server, which is
nearer to the model than what these scales would round them to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from swarm.errors import CheckpointError
from swarm.models.checkpoints.safetensors_header import DTYPES
from swarm.models.weights import packed
from swarm.models.weights.packed import Grid, PackedWeight

ADVICE = (
    "use the model's checkpoint in bfloat16, or one in FP8, MXFP4, NVFP4, compressed-tensors, AWQ or GPTQ as it was "
    "published"
)

FP8_BLOCK = (128, 128)
MX_GROUP = 32
NV_GROUP = 16
MLX_GROUP = 64
PACKED_BITS = {2, 4, 8}
MAX_GROUP = 1 << 20

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are powers of two: the exponent, plus 127."""

_ACTIVATIONS = re.compile(
    r"(?:.*_)?(?:input|output|activation|act|[qkv]|kv)_(?:scale|scale_inv|scale_ub|global_scale|zero_point|amax)|qscale_act"
)
_COMPANIONS = re.compile(
    r"(?:.*_)?(?:scales?|scale_inv|scale_2|qscale_weight|zeros|zero_points?|qzeros|qweight|weight_packed|weight_shape"
    r"|weight_bits|g_idx|perm|biases|blocks|bitmask|compressed|absmax|quant_map|codebooks?|codes|SCB|weight_format)"
)
_ONLY_PACKED = re.compile(
    r".*_scale_inv|weight_(?:scale.*|packed|shape|zero_point|g_idx|global_scale)|pre_quant_scale|qweight|qzeros|absmax"
)
"""Names that no plain tensor has, unlike some of the ones before, which families have as well."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


def take_packed(tensors: dict[str, torch.Tensor], quantization: Mapping[str, object] | None) -> dict[str, PackedWeight]:
    """Take the packed weights out of `tensors`, with all that belongs to them; by the names that the family gives them.

    Args:
        quantization: `quantization_of` the config. transformers unpacks what is packed by bitsandbytes.

    Raises:
        CheckpointError: a tensor is packed in a way that is not read, or does not fit the others of its weight.
    """
    found = dict[str, PackedWeight]()
    quantization = quantization or {}
    is_read = not is_bitsandbytes(quantization)
    for name in list(tensors):
        rule = _rule(name, tensors) if is_read else None
        if rule is None:
            continue
        weight = _Stored(rule[0], tensors.pop(name), tensors, quantization)
        if weight.name in found or weight.name in tensors:
            raise weight.wrong("is in the checkpoint twice, in different forms")
        found[weight.name] = rule[1](weight)
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if is_read and _ONLY_PACKED.fullmatch(last) and not _ACTIVATIONS.fullmatch(last):
            raise _unknown_part(name)
        is_integer = is_read and last == "weight" and (not tensor.is_floating_point() or tensor.dtype in _EXPONENTS)
        if is_integer or tensor.dtype in _FP8:
            raise unscaled(name, _said(tensor))
    return found


def refuse_companions(unexpected: Iterable[str]) -> None:
    """Raise `CheckpointError` if one of the tensors that a model does not have looks like a part of a packed weight."""
    for name in sorted(unexpected):
        last = name.rpartition(".")[2]
        if _COMPANIONS.fullmatch(last) and not _ACTIVATIONS.fullmatch(last) and "rotary" not in name:
            raise _unknown_part(name)


def is_integers(dtype: str) -> bool:
    """Whether weights of this dtype, by safetensors' name of it, are packed."""
    return dtype in ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32", "U32")


def held_bytes(name: str, dtype: str, size: int, itemsize: int) -> int:
    """Bytes that a stored tensor takes where packed weights stay packed, and others are held in `itemsize` bytes.

    Scales in 16 bits are counted twice: torch's kernel for 4 bits has an offset beside each of them.
    """
    last = name.rpartition(".")[2]
    if is_integers(dtype) or dtype == "F8_E8M0" or _COMPANIONS.fullmatch(last) or _ACTIVATIONS.fullmatch(last):
        return size * 2 if dtype in ("F16", "BF16") and "scale" in last else size
    return size // DTYPES[dtype].itemsize * itemsize if dtype in DTYPES else size


def unscaled(name: str, stored: str) -> CheckpointError:
    """The error for a tensor that is stored in a form from which its numbers do not follow."""
    return CheckpointError(f"{name} is {stored}, and no scales say which numbers that means: {ADVICE}")


def _unknown_part(name: str) -> CheckpointError:
    return CheckpointError(f"{name} looks like a part of a packed weight, which cannot be unpacked here: {ADVICE}")


def quantization_of(config: object) -> Any:
    """What a config says of packed weights; None if nothing. The config is foreign, so it may be anything."""
    return getattr(config, "quantization_config", None) or getattr(config, "quantization", None) or None


def is_bitsandbytes(quantization: Mapping[str, object] | None) -> bool:
    """Whether transformers unpacks the weights: it does so only for those of bitsandbytes."""
    found = quantization or {}
    return bool(found.get("load_in_4bit") or found.get("load_in_8bit") or found.get("quant_method") == "bitsandbytes")


def _known(key: str, *values: object) -> Callable[[Mapping[str, Any]], str]:
    """A check that one setting has one of these values; its message if it has another."""
    return lambda found: "" if found.get(key) in values else f"{key} {str(found.get(key))[:32]!r}"


def _compressed_tensors_problem(quantization: Mapping[str, Any]) -> str:
    packed = (f"{one}-quantized" for one in ("pack", "int", "float", "naive", "mxfp8", "nvfp4-pack", "mxfp4-pack"))
    sparsity, transforms = quantization.get("sparsity_config"), quantization.get("transform_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return "a sparse format"
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups", True)):
        return "rotations of hidden states"
    return _known("format", *packed, "mixed-precision", "dense", None)(quantization)


def _modelopt_problem(quantization: Mapping[str, Any]) -> str:
    inner = quantization.get("quantization")
    known = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "MIXED_PRECISION", None)
    return _known("quant_algo", *known)(inner if isinstance(inner, Mapping) else quantization)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8", "mxfp4", "bitsandbytes"), lambda _: ""),
    "compressed-tensors": _compressed_tensors_problem,
    "modelopt": _modelopt_problem,
    "awq": lambda found: _known("version", "gemm", "GEMM", None)(found) or _known("bits", 4, None)(found),
    "gptq": lambda found: (
        _known("checkpoint_format", "gptq", "gptq_v2", None)(found) or _known("bits", 2, 3, 4, 8, None)(found)
    ),
    "mlx": lambda found: _known("mode", "affine", None)(found) or _mlx_problem(found),
}
"""For each method that is read: what of a config's settings for it is not."""


def _mlx_problem(quantization: Mapping[str, Any]) -> str:
    layers = [one for one in quantization.values() if isinstance(one, Mapping)]
    sizes = [one["group_size"] for one in layers if "group_size" in one]
    return "groups of several sizes" if any(one != quantization["group_size"] for one in sizes) else ""


def format_problem(quantization: object) -> str:
    """Why a checkpoint with this `quantization_of` its config cannot be read here; empty if it can."""
    if not quantization:
        return ""
    if not isinstance(quantization, Mapping):
        return f"quantization_config is {str(quantization)[:32]!r}, which is not an object"
    method = _method(quantization)
    if method not in _METHODS:
        return f"its weights are packed by {method[:32] or 'an unnamed method'!r}, which is not read here; {ADVICE}"
    problem = _METHODS[method](quantization)
    return f"its weights are packed by {method!r} with {problem}, which is not read here; {ADVICE}" if problem else ""


def _method(quantization: Mapping[str, Any]) -> str:
    if is_bitsandbytes(quantization):
        return "bitsandbytes"
    if quantization.get("quant_method") is not None:
        return str(quantization["quant_method"])
    if "quant_algo" in quantization or isinstance(quantization.get("quantization"), Mapping):
        return "modelopt"
    return "mlx" if "bits" in quantization and "group_size" in quantization else ""


def _schemes(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How each group of layers of compressed-tensors is packed."""
    groups = quantization.get("config_groups")
    described = groups.values() if isinstance(groups, Mapping) else ()
    found = [one.get("weights") for one in described if isinstance(one, Mapping)]
    return [one for one in found if isinstance(one, Mapping)]


def _blocks(quantization: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The rows and the columns that may share a scale of FP8."""
    schemes = _schemes(quantization)
    sizes = [quantization.get("weight_block_size"), *(one.get("block_structure") for one in schemes)]
    found = [(_size(one[0]), _size(one[1])) for one in sizes if isinstance(one, list) and len(one) == 2]
    found += [(1, _size(one.get("group_size"))) for one in schemes]
    return [one for one in [*found, FP8_BLOCK] if all(one)]


def _size(value: object) -> int:
    """A number of rows, columns or bits; 0 if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_GROUP else 0


@dataclass(frozen=True)
class _Stored:
    """What is stored of a packed weight.

    Attributes:
        name: of the plain weight.
        data: the tensor with the packed values.
        left: the tensors that belong to no weight yet.
        quantization: what the config says of packed weights.
    """

    name: str
    data: torch.Tensor
    left: dict[str, torch.Tensor]
    quantization: Mapping[str, Any]

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} {what}: the checkpoint is damaged, or packed in a way that is not read here; {ADVICE}"
        )

    def take(self, *endings: str) -> torch.Tensor | None:
        """The first of these tensors that there is: "_scale" of x.weight is x.weight_scale, and ".scale" is x.scale."""
        for name in _companions(self.name, endings):
            if name in self.left:
                return self.left.pop(name)
        return None

    def need(self, *endings: str) -> torch.Tensor:
        found = self.take(*endings)
        if found is None:
            raise self.wrong(f"lacks {_companions(self.name, endings)[0]}")
        return found

    def expect(self, fits: bool, what: str, tensor: torch.Tensor) -> None:
        if not fits:
            raise self.wrong(f"does not fit its {what}, which are {_said(tensor)}; it is packed in {_said(self.data)}")

    def floats(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales, in a dtype of numbers."""
        if scales.dtype is torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        self.expect(scales.is_floating_point(), "scales", scales)
        return scales

    def grid(
        self,
        scales: torch.Tensor,
        shape: torch.Size,
        blocks: Iterable[tuple[int, int]],
        factor: float = 1.0,
        divisor: float = 1.0,
    ) -> Grid:
        """Where in a weight of this shape each of its scales belongs, which their shape says."""
        *lead, rows, columns = shape
        found, experts = tuple(scales.shape), math.prod(lead)
        layouts = [
            ((*lead,), rows, columns),
            ((*lead, 1, 1), rows, columns),
            ((*lead, rows), 1, columns),
            ((*lead, rows, 1), 1, columns),
            *([((*lead, 1, columns), rows, 1)] if lead else []),
            *(((*lead, -(-rows // one[0]), -(-columns // one[1])), *one) for one in blocks),
        ]
        values = self.floats(scales)
        if values.numel() == 1:
            return Grid(values.reshape(1, 1, 1).expand(experts, 1, 1), rows, columns, None, factor, divisor)
        for layout, height, width in layouts:
            if layout == found:
                values = values.reshape(experts, -(-rows // height), -1)
                return Grid(values, height, min(width, columns), None, factor, divisor)
        raise self.wrong(f"has the shape {list(shape)}, which does not fit its scales of the shape {list(found)}")


def _companions(name: str, endings: Iterable[str]) -> list[str]:
    return [(name if one[0] == "_" else name.removesuffix(".weight")) + one for one in endings]


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of the shape {list(tensor.shape)}"


_SCALES = ("_scale_inv", "_scale", "_weight_scale", ".scale", ".qscale_weight")


def _rule(name: str, left: Mapping[str, torch.Tensor]) -> tuple[str, Callable[[_Stored], PackedWeight]] | None:
    """The name of the dense weight, and what unpacks it, if a tensor holds the values of a packed one."""
    stem, dot, last = name.rpartition(".")
    tensor = left.get(name)
    if tensor is None or tensor.ndim < 2 or 0 in tensor.shape:
        return None
    if last == "weight_packed":
        return f"{stem}{dot}weight", _pack_quantized if tensor.dtype is torch.int32 else _fp4
    if last == "qweight":
        return f"{stem}{dot}weight", _gptq_or_awq
    if last.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in left:
        return name.removesuffix("_blocks"), _mxfp4_experts
    if _COMPANIONS.fullmatch(last) or _ACTIVATIONS.fullmatch(last):
        return None
    scales = next((left[one] for one in _companions(name, (*_SCALES, ".scales")) if one in left), None)
    if scales is None:
        return None
    if tensor.dtype in _FP8:
        return name, _fp8
    if tensor.dtype is torch.uint32:
        return name, _mlx
    if tensor.dtype is torch.uint8 or (tensor.dtype is torch.int8 and scales.dtype in _EXPONENTS):
        return name, _fp4
    return (name, _int8) if tensor.dtype is torch.int8 else None


def _fp8(weight: _Stored) -> PackedWeight:
    scales, zeros, data = weight.need(*_SCALES), weight.take("_zero_point"), weight.data
    if zeros is not None and bool(zeros.reshape(-1).view(torch.uint8).any()):
        raise weight.wrong("has zero points beside float8")
    if (
        weight.quantization.get("quant_method") == "fbgemm_fp8"
        and data.ndim == 3
        and scales.shape == (len(data), data.shape[2], 1)
    ):
        scales = scales.transpose(1, 2)  # of experts that are stored as [in, out]
    exponents = [(1, MX_GROUP)] if scales.dtype in _EXPONENTS else []
    grid = weight.grid(scales, data.shape, [*_blocks(weight.quantization), *exponents])
    # The library of the format multiplies in the dtype of the scales; transformers does it itself for experts.
    is_rounded = weight.quantization.get("quant_method") == "compressed-tensors" and not _EXPERT.search(weight.name)
    rounded = scales.dtype if is_rounded and scales.dtype not in _EXPONENTS else torch.float32
    flat = data.reshape(-1, *data.shape[-2:])
    return PackedWeight(flat, packed.fp8_numbers, data.shape, grid, rounded=rounded)


def _fp4(weight: _Stored) -> PackedWeight:
    """NVFP4, of compressed-tensors or ModelOpt, and MXFP4."""
    scales = weight.need(*_SCALES)
    weight.expect(weight.data.dtype in (torch.uint8, torch.int8), "values", weight.data)
    weight.expect(scales.dtype in (*_FP8, *_EXPONENTS), "scales", scales)
    data = weight.data.view(torch.uint8).reshape(-1, *weight.data.shape[-2:])
    shape = torch.Size((*weight.data.shape[:-1], 2 * weight.data.shape[-1]))
    factor, divisor, rounded = 1.0, 1.0, torch.float32
    if scales.dtype in _FP8:
        if (divides := weight.take("_global_scale")) is not None:
            divisor, rounded = _one(weight, divides), torch.bfloat16  # as the library of the format
        else:
            factor = _one(weight, weight.need("_scale_2", "_weight_scale_2"))
    group = MX_GROUP if scales.dtype in _EXPONENTS else NV_GROUP
    grid = weight.grid(scales, shape, [(1, group)], factor, divisor)
    return PackedWeight(data, packed.fp4_numbers, shape, grid, rounded=rounded)


def _mxfp4_experts(weight: _Stored) -> PackedWeight:
    """Experts of gpt-oss: blocks [experts, out, groups, 16] of a weight [experts, in, out]."""
    blocks, scales = weight.data, weight.need("_scales")
    is_packed = blocks.dtype is torch.uint8 and blocks.ndim == 4 and blocks.shape[3] * 2 == MX_GROUP
    weight.expect(is_packed, "values", blocks)
    weight.expect(scales.dtype in _EXPONENTS and scales.shape == blocks.shape[:3], "scales", scales)
    data = blocks.flatten(2)
    shape = torch.Size((*data.shape[:2], 2 * data.shape[2]))
    grid = weight.grid(scales, shape, [(1, MX_GROUP)])
    return PackedWeight(data, packed.fp4_numbers, shape, grid, is_transposed=True)


def _pack_quantized(weight: _Stored) -> PackedWeight:
    """Integers of compressed-tensors, in words of 32 bits."""
    data, described = weight.data, weight.take("_shape")
    weight.expect(data.ndim == 2, "layout", data)
    rows, words = data.shape
    columns = 0
    if described is not None:
        is_shape = described.dtype in (torch.int32, torch.int64) and described.numel() == 2
        weight.expect(is_shape and int(described.flatten()[0]) == rows, "shape", described)
        columns = int(described.flatten()[1])
    integers = [one for one in _schemes(weight.quantization) if one.get("type") != "float"]
    bits_of = {_size(one.get("num_bits")) for one in integers} & PACKED_BITS or PACKED_BITS
    fitting = [one for one in bits_of if not columns or -(-columns * one // 32) == words]
    if len(fitting) != 1:
        raise weight.wrong(f"is {_said(data)}, from which its number of bits does not follow")
    bits = fitting[0]
    shape = torch.Size((rows, columns or words * 32 // bits))
    return _affine(weight, shape, bits, 1 << (bits - 1), partial(packed.word_numbers, bits=bits, columns=shape[1]))


def _int8(weight: _Stored) -> PackedWeight:
    weight.expect(weight.data.ndim == 2, "layout", weight.data)
    return _affine(weight, weight.data.shape, 8, 0, packed.int8_numbers)


def _affine(weight: _Stored, shape: torch.Size, bits: int, middle: int, numbers: packed.Numbers) -> PackedWeight:
    """An integer weight of compressed-tensors; without zero points, the integer `middle` stands for 0."""
    scales, zeros, order = weight.need(*_SCALES), weight.take("_zero_point"), weight.take("_g_idx")
    weight.expect(scales.is_floating_point() and scales.dtype.itemsize > 1, "scales", scales)
    groups = scales.shape[-1] if scales.ndim == 2 else 1
    grid = weight.grid(scales, shape, [(1, shape[1] // groups)] if groups and shape[1] % groups == 0 else [])
    if order is not None and not bool((order == -1).any()):  # -1 says that columns are in order
        grid = Grid(grid.values, grid.height, grid.width, _groups(weight, order, shape[1], groups))
    offsets: Grid | float = float(middle)
    if zeros is not None:
        experts, rows, columns = grid.values.shape
        is_packed = zeros.dtype is torch.int32 and zeros.shape == (-(-rows * bits // 32), columns)
        fits = is_packed or (zeros.dtype is torch.int8 and zeros.numel() == grid.values.numel())
        weight.expect(fits, "zeros", zeros)
        found = packed.integers(zeros.T, bits, rows).T if is_packed else zeros.float() + middle
        found = found.to(torch.uint8 if middle else torch.int8).reshape(experts, rows, columns)
        offsets = Grid(found, grid.height, grid.width, grid.columns)
    # The library of the format rounds to the dtype of the scales as well.
    return PackedWeight(weight.data[None], numbers, shape, grid, zeros=offsets, rounded=scales.dtype, bits=bits)


def _gptq_or_awq(weight: _Stored) -> PackedWeight:
    """Both keep [in, out]; AWQ packs along the second dimension in an order of its own, GPTQ along the first."""
    data, zeros, scales = weight.data, weight.need(".qzeros"), weight.need(".scales")
    order = weight.take(".g_idx")
    for one, what in ((data, "values"), (zeros, "zeros")):
        weight.expect(one.dtype is torch.int32 and one.ndim == 2, what, one)
    weight.expect(scales.is_floating_point() and scales.ndim == 2 and scales.numel() > 0, "scales", scales)
    groups, rows = scales.shape
    is_awq = data.shape[1] * 8 == rows
    bits = 4 if is_awq else zeros.shape[1] * 32 // rows
    weight.expect(bits in (2, 3, 4, 8) and zeros.shape == (groups, -(-rows * bits // 32)), "zeros", zeros)
    weight.expect(is_awq or data.shape[1] == rows, "scales", scales)
    columns = len(data) if is_awq else len(data) * 32 // bits
    found = None if order is None else _groups(weight, order, columns, groups)
    if found is None:
        weight.expect(columns % groups == 0, "scales", scales)
    elif columns % groups == 0 and torch.equal(found, torch.arange(columns, dtype=torch.int32) // (columns // groups)):
        found = None  # the columns are in order
    if is_awq:
        offset = packed.awq_columns(zeros)
    elif weight.quantization.get("quant_method") != "gptq":
        raise weight.wrong(
            "has zero points of GPTQ, and no quantization_config says in which of two ways they are stored"
        )
    else:
        offset = packed.integers(zeros, bits, rows)
        if weight.quantization.get("checkpoint_format") != "gptq_v2":  # before, zero points were stored less one
            offset = (offset + 1) % (1 << bits)
    numbers = packed.awq_numbers if is_awq else partial(packed.gptq_numbers, bits=bits, columns=columns)
    width = max(1, columns // groups)
    grid = Grid(weight.floats(scales).T[None].contiguous(), 1, width, found)
    offsets = Grid(offset.to(torch.uint8).T[None].contiguous(), 1, width, grid.columns)
    return PackedWeight(data[None], numbers, (rows, columns), grid, zeros=offsets, bits=bits)


def _mlx(weight: _Stored) -> PackedWeight:
    """Integers of MLX in words of 32 bits, each group with a scale and a bias."""
    data, scales, biases = weight.data.view(torch.int32), weight.need(".scales"), weight.need(".biases")
    weight.expect(data.ndim == 2 and scales.ndim == 2 and len(scales) == len(data), "scales", scales)
    weight.expect(biases.shape == scales.shape, "biases", biases)
    group = _size(weight.quantization.get("group_size")) or MLX_GROUP
    rows, columns = len(data), scales.shape[1] * group
    bits = data.shape[1] * 32 // max(1, columns)
    weight.expect(bits in (2, 3, 4, 5, 6, 8) and columns * bits == data.shape[1] * 32, "scales", scales)
    grid = weight.grid(scales, torch.Size((rows, columns)), [(1, group)])
    offsets = Grid(weight.floats(biases).reshape(grid.values.shape), grid.height, grid.width)
    numbers = partial(packed.word_numbers, bits=bits, columns=columns)
    return PackedWeight(data[None], numbers, (rows, columns), grid, biases=offsets, bits=bits)


def _groups(weight: _Stored, order: torch.Tensor, columns: int, groups: int) -> torch.Tensor:
    """The group of each column, checked: it is used as an index."""
    is_order = order.dtype in (torch.int32, torch.int64) and order.shape == (columns,)
    weight.expect(is_order and bool(((order >= 0) & (order < groups)).all()), "groups of columns", order)
    return order.int()


def _one(weight: _Stored, scale: torch.Tensor) -> float:
    weight.expect(scale.numel() == 1 and scale.is_floating_point(), "scale", scale)
    return float(scale)
