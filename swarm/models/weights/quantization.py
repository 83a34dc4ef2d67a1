"""Weights in 8 and 4 bits: the forms, the memory that they take, and the linear layers that hold them.

    none    the dtype that the server computes in
    int8    on a CPU one scale for each output, weights only; on a GPU LLM.int8 of bitsandbytes, where inputs beyond a
            threshold are multiplied in 16 bits (Dettmers et al. 2022a, Petals section 3.1)
    nf4     on a GPU: 4-bit NormalFloat of bitsandbytes, scales quantized too (Dettmers et al. 2023)
    int4    on a CPU, which has no fast kernels for NF4: 16 evenly spaced values between the least and the greatest of
            each group of weights

On a CPU, torch's own kernels multiply few tokens by the packed weights. For many tokens a plain product in bfloat16 is
faster, so the weight is unpacked part by part, and each part is multiplied while it is in the processor's cache. Both
ways round the inputs to bfloat16. Only plain linear layers are quantized; the fused experts of a mixture are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from swarm.errors import InvalidOption
from swarm.models.weights.frozen_linear import FrozenLinear, replace_linears

NONE, INT8, NF4, INT4 = "none", "int8", "nf4", "int4"
QUANTIZATION_FORMS = frozenset({NONE, INT8, NF4, INT4})

INT4_GROUP_SIZE = 64
"""Weights that share a scale and an offset in int4."""

UNPACKED_PART_WEIGHTS = 1 << 20
"""Weights that are unpacked at once, few enough to stay in the processor's cache until they are multiplied."""

LLM_INT8_INPUT_THRESHOLD = 6.0
"""LLM.int8 multiplies inputs beyond it in 16 bits."""


def form_for_device(device: torch.device, requested: str) -> str:
    """The form in which `requested` ("none", "int8" or "nf4") is held on a device: 4 bits on a CPU are int4."""
    return INT4 if requested == NF4 and device.type != "cuda" else requested


def quantizable(linear: nn.Module, form: str) -> bool:
    """Whether a layer's weight can be held in `form`; layers of other shapes stay as they are."""
    if type(linear) is not nn.Linear:
        return False
    if form == INT8:
        return linear.in_features % 16 == 0
    if form == INT4:
        return linear.in_features % INT4_GROUP_SIZE == 0 and linear.out_features % 16 == 0
    return linear.in_features % INT4_GROUP_SIZE == 0


def quantized_bytes(out_features: int, in_features: int, form: str) -> int:
    """Bytes of a weight in `form`, its scales included."""
    values = out_features * in_features
    if form == INT8:
        return values + 4 * out_features  # bitsandbytes' scales take 4 bytes, torch's 2
    if form == INT4:
        return values // 2 + 4 * (values // INT4_GROUP_SIZE)
    # One scale in 8 bits for a group, one in 32 for 256 groups, and the tables of both codes.
    return values // 2 + values // INT4_GROUP_SIZE + 4 * -(-values // (INT4_GROUP_SIZE * 256)) + 4 * (16 + 256)


def weight_bytes(model: nn.Module) -> int:
    """Memory that the weights of a model take, in whatever form."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def _bytes(parameter: torch.Tensor) -> int:
    found: list[Any] = [parameter, getattr(parameter, "SCB", None)]
    state = getattr(parameter, "quant_state", None)  # NF4's scales are not parameters
    while state is not None:
        found += [state.absmax, state.code]
        state = state.state2
    return sum(one.numel() * one.element_size() for one in found if one is not None)


def quantize(layers: nn.Module, form: str, device: torch.device) -> None:
    """Replace, in place, the linear layers of `layers` (still on the CPU) by quantized ones on `device`.

    Raises `InvalidOption` if this machine cannot compute with them.
    """
    require_available(form, device)
    if form == NONE:
        return
    on_gpu = device.type == "cuda"
    makers: dict[str, type[FrozenLinear]] = {INT8: Int8Linear, INT4: Int4Linear}

    def replacement(linear: nn.Linear) -> nn.Module | None:
        if not quantizable(linear, form):
            return None
        return BitsAndBytesLinear(linear, form, device) if on_gpu else makers[form](linear)

    replace_linears(layers, replacement)


def require_available(form: str, device: torch.device) -> None:
    """Raise `InvalidOption` if this machine cannot compute with weights in `form`."""
    if form == NONE:
        return
    if device.type == "cuda":
        if find_spec("bitsandbytes") is None:
            raise InvalidOption(
                f"--quant {form}: on a GPU the package bitsandbytes does that, and it is not installed; "
                "pip install bitsandbytes, or use none"
            )
        return
    if device.type != "cpu":
        raise InvalidOption(f"--quant: weights are quantized on CPUs and CUDA devices, not on {device.type}; use none")
    if form == INT4 and _int4_layout() is None:
        raise InvalidOption(
            "--quant nf4: this version of torch packs 4-bit weights in an unknown way; use int8 or none"
        )
    if form == INT8 and not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        raise InvalidOption("--quant int8: this version of torch has no 8-bit products on CPUs; use none")


class _WeightOnlyLinear(FrozenLinear):
    """A linear layer on the CPU with packed weights: a kernel for few tokens, unpacking by parts for many."""

    rounds_inputs = True
    MAX_KERNEL_TOKENS: int
    """The largest batch for which the kernel on packed weights is faster."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.dtype = linear.weight.dtype

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        kernel = len(tokens) <= self.MAX_KERNEL_TOKENS
        result = (self._multiply_packed(tokens) if kernel else self._multiply_by_parts(tokens)).to(inputs.dtype)
        if self.bias is not None:
            result += self.bias
        return result.view(*inputs.shape[:-1], self.out_features)

    def dense(self) -> torch.Tensor:
        return torch.cat([self._unpack_part(start, end) for start, end in self._part_bounds()]).to(self.dtype)

    def _multiply_by_parts(self, tokens: torch.Tensor) -> torch.Tensor:
        result = tokens.new_empty(len(tokens), self.out_features)
        for start, end in self._part_bounds():
            self._multiply_part(tokens, start, end, result[:, start:end])
        return result

    def _part_bounds(self) -> Iterable[tuple[int, int]]:
        rows = max(64, UNPACKED_PART_WEIGHTS // self.in_features // 64 * 64)
        return ((start, min(start + rows, self.out_features)) for start in range(0, self.out_features, rows))

    def _multiply_packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens, in]` to `[tokens, out]`, bfloat16, without bias."""
        raise NotImplementedError

    def _unpack_part(self, start: int, end: int) -> torch.Tensor:
        """Rows [start, end) of the weight in bfloat16; `start` is a multiple of 64."""
        raise NotImplementedError

    def _multiply_part(self, tokens: torch.Tensor, start: int, end: int, result: torch.Tensor) -> None:
        """Write the products of tokens and rows [start, end) of the weight to `result`, `[tokens, end - start]`."""
        raise NotImplementedError


class Int8Linear(_WeightOnlyLinear):
    """8 bits a weight, symmetric, one scale an output."""

    MAX_KERNEL_TOKENS = 12

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values = torch.empty_like(linear.weight, dtype=torch.int8)
        scales = torch.empty(self.out_features, dtype=torch.bfloat16)
        for start, end in self._part_bounds():
            weight = linear.weight[start:end].to(torch.float32, copy=True)
            # Rounded first, so that what the kernel multiplies by is what the values were divided by.
            scales[start:end] = (weight.abs().amax(dim=1) / 127).clamp_(min=1e-12)
            weight.div_(scales[start:end].float().unsqueeze(1)).round_().clamp_(-127, 127)
            values[start:end] = weight
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def _multiply_packed(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, torch.ops.aten._weight_int8pack_mm.default(tokens, self.values, self.scales))

    def _unpack_part(self, start: int, end: int) -> torch.Tensor:
        return self.values[start:end].to(torch.bfloat16).mul_(self.scales[start:end].unsqueeze(1))

    def _multiply_part(self, tokens: torch.Tensor, start: int, end: int, result: torch.Tensor) -> None:
        torch.mul(
            functional.linear(tokens, self.values[start:end].to(tokens.dtype)), self.scales[start:end], out=result
        )


class Int4Linear(_WeightOnlyLinear):
    """4 bits a weight, asymmetric, one scale and one offset (bfloat16) for each group of `INT4_GROUP_SIZE` weights."""

    MAX_KERNEL_TOKENS = 64

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = self.in_features // INT4_GROUP_SIZE
        values = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8)
        scales_GO2 = torch.empty(groups, self.out_features, 2, dtype=torch.bfloat16)
        for start, end in self._part_bounds():  # torch packs blocks of 64 rows, so parts can be packed alone
            weight_OGK = (
                linear.weight[start:end].to(torch.float32, copy=True).view(end - start, groups, INT4_GROUP_SIZE)
            )
            least, greatest = weight_OGK.aminmax(dim=2)
            scales_OG = ((greatest - least) / 15).clamp_(min=1e-9).bfloat16().float()
            offsets_OG = (least + 8 * scales_OG).bfloat16().float()
            weight_OGK.sub_(offsets_OG.unsqueeze(2)).div_(scales_OG.unsqueeze(2)).round_().add_(8).clamp_(0, 15)
            values[start:end] = _pack_int4(weight_OGK.flatten(1).to(torch.int32))
            scales_GO2[:, start:end] = torch.stack([scales_OG.T, offsets_OG.T], dim=2)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales_GO2, requires_grad=False)

    def _multiply_packed(self, tokens: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        return cast(torch.Tensor, multiply(tokens, self.values, INT4_GROUP_SIZE, self.scales))

    def _unpack_part(self, start: int, end: int) -> torch.Tensor:
        return torch.cat([block.transpose(1, 2).flatten(0, 1) for block in self._unpack_blocks(start, end)])

    def _multiply_part(self, tokens: torch.Tensor, start: int, end: int, result: torch.Tensor) -> None:
        done = 0
        for weight_BIR in self._unpack_blocks(start, end):
            blocks, _, rows = weight_BIR.shape
            place = result[:, done : done + blocks * rows].unflatten(1, (blocks, rows))
            place.copy_((tokens @ weight_BIR).transpose(0, 1))
            done += blocks * rows

    def _unpack_blocks(self, start: int, end: int) -> Iterator[torch.Tensor]:
        """Rows [start, end) of the weight as they are packed, `[blocks, in, rows of a block]` in bfloat16.

        They are multiplied as they lie: to transpose them takes longer than to unpack them.
        """
        layout = _int4_layout()
        assert layout is not None
        half, groups = self.in_features // 2, self.in_features // INT4_GROUP_SIZE
        for levels_BIR in _unpack_int4(self.values.view(-1)[start * half : end * half], end - start, *layout):
            blocks, _, rows = levels_BIR.shape
            scales_GO2 = self.scales[:, start : start + blocks * rows]
            scales_BGR, offsets_BGR = scales_GO2.view(groups, blocks, rows, 2).permute(3, 1, 0, 2).contiguous()
            weight = levels_BIR.to(torch.bfloat16).sub_(8).view(blocks, groups, INT4_GROUP_SIZE, rows)
            weight.mul_(scales_BGR.unsqueeze(2)).add_(offsets_BGR.unsqueeze(2))
            yield weight.view(blocks, self.in_features, rows)
            start += blocks * rows


def _pack_int4(levels: torch.Tensor) -> torch.Tensor:
    """Levels 0 to 15, `[out, in]` int32, packed as torch's kernel expects them."""
    return cast(torch.Tensor, torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(levels, 1))


def _unpack_int4(packed: torch.Tensor, rows: int, block: int, halves: bool) -> list[torch.Tensor]:
    """The levels of `rows` rows of a weight, uint8 `[blocks, in, rows of a block]`: full blocks, the smaller last one.

    torch packs blocks of rows: for each input the levels of the block lie together, two a byte, either the first half
    of the block beside the second one (`halves`) or neighbors; a last, smaller block always has neighbors.
    """
    inputs, full = packed.numel() * 2 // rows, rows // block * block
    found = []
    for start, end, size in ((0, full, block), (full, rows, rows - full)):
        if start == end:
            continue
        bytes_BIR = packed[start * inputs // 2 : end * inputs // 2].view(-1, inputs, size // 2)
        low, high = bytes_BIR & 15, bytes_BIR >> 4
        found.append(torch.cat([low, high], 2) if halves and size == block else torch.stack([low, high], 3).flatten(2))
    return found


@cache
def _int4_layout() -> tuple[int, bool] | None:
    """How torch packs 4-bit weights on this processor, found by packing known ones; None if the way is unknown."""
    levels = torch.randint(16, (176, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    try:
        packed = _pack_int4(levels).view(-1)
    except (RuntimeError, AttributeError):
        return None
    for layout in ((64, True), (32, True), (64, False), (32, False)):
        found = [block.transpose(1, 2).flatten(0, 1) for block in _unpack_int4(packed, len(levels), *layout)]
        if torch.equal(torch.cat(found).int(), levels):
            return layout
    return None


class BitsAndBytesLinear(FrozenLinear):
    """LLM.int8 or NF4. bitsandbytes quantizes while the weight moves to the device."""

    def __init__(self, linear: nn.Linear, form: str, device: torch.device) -> None:
        super().__init__(linear)
        import bitsandbytes as bnb

        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        weight, dtype = linear.weight.detach(), linear.weight.dtype
        inner: Any
        if form == INT8:
            inner = bnb.nn.Linear8bitLt(
                *sizes, has_fp16_weights=False, threshold=LLM_INT8_INPUT_THRESHOLD, device="meta"
            )
            # LLM.int8 is defined on 16-bit weights.
            inner.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
        else:
            inner = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
            inner.weight = bnb.nn.Params4bit(
                weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=inner
            )
        inner.bias = linear.bias
        self.dtype, self.form = dtype, form
        self.rounds_inputs = form == INT8
        self.bias: nn.Parameter | None = None  # the inner module adds it
        self.inner = inner.requires_grad_(False).to(device)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.inner(inputs))

    def dense(self) -> torch.Tensor:
        import bitsandbytes.functional as bnb

        weight = self.inner.weight
        if self.form == NF4:
            return cast(torch.Tensor, bnb.dequantize_4bit(weight.data, weight.quant_state)).to(self.dtype)
        # The first product moves the scales from the weight to the module's state.
        scales = weight.SCB if weight.SCB is not None else self.inner.state.SCB
        return cast(torch.Tensor, weight.data * (scales / 127).unsqueeze(1)).to(self.dtype)
