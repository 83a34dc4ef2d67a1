"""Weights in 8 and 4 bits: the forms, the memory that they take, and which layers hold them.

    none    the dtype that the server computes in
    packed  as the checkpoint stores them, if it does in fewer bits (`swarm.models.weights.packed`)
    int8    one scale for each output, weights only
    nf4     on a GPU: bitsandbytes' 4-bit NormalFloat, scales quantized too (Dettmers et al. 2023)
    int4    on a CPU, which has no fast kernels for NF4: 16 evenly spaced values between the least and the greatest of
            each group of weights

Only plain linear layers are quantized; the fused experts of a mixture are not, unless the checkpoint has them packed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn

from swarm.errors import InvalidOption
from swarm.models.weights.frozen_linear import FrozenLinear, replace_linears
from swarm.models.weights.weight_only import (
    INT4_GROUP_SIZE,
    Int4Linear,
    Int8Linear,
    TwoDigitInt8Linear,
    int4_layout,
)

NONE, PACKED, INT8, NF4, INT4 = "none", "packed", "int8", "nf4", "int4"
QUANTIZATION_FORMS = frozenset({NONE, PACKED, INT8, NF4, INT4})


def form_for_device(device: torch.device, requested: str) -> str:
    """The form in which `requested` (as in --quant) is held on a device: 4 bits are nf4 on a GPU only."""
    return INT4 if requested == NF4 and device.type != "cuda" else requested


def quantizable(linear: nn.Module, form: str) -> bool:
    """Whether a layer's weight can be held in `form`; layers of other shapes stay as they are."""
    if type(linear) is not nn.Linear:
        return False
    if form == INT8:
        return linear.in_features % 16 == 0 and linear.out_features % 8 == 0
    if form == INT4:
        return linear.in_features % INT4_GROUP_SIZE == 0 and linear.out_features % 16 == 0
    return linear.in_features % INT4_GROUP_SIZE == 0


def quantized_bytes(out_features: int, in_features: int, form: str) -> int:
    """Bytes of a weight in `form`, its scales included."""
    values = out_features * in_features
    if form == INT8:
        return values + 2 * out_features
    if form == INT4:
        return values // 2 + 4 * (values // INT4_GROUP_SIZE)
    # One scale in 8 bits for a group, one in 32 for 256 groups, and the tables of both codes.
    return values // 2 + values // INT4_GROUP_SIZE + 4 * -(-values // (INT4_GROUP_SIZE * 256)) + 4 * (16 + 256)


def weight_bytes(model: nn.Module) -> int:
    """Memory that the weights of a model take, in whatever form."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def _bytes(parameter: torch.Tensor) -> int:
    found: list[Any] = [parameter]
    state = getattr(parameter, "quant_state", None)  # NF4's scales are not parameters
    while state is not None:
        found += [state.absmax, state.code]
        state = state.state2
    return sum(one.numel() * one.element_size() for one in found if one is not None)


def quantize(layers: nn.Module, form: str, device: torch.device) -> None:
    """Replace, in place, the linear layers of `layers` by quantized ones on `device`.

    Raises `InvalidOption` if this machine cannot compute with them.
    """
    require_available(form, device)
    if form in (NONE, PACKED):
        return

    def replacement(linear: nn.Linear) -> nn.Module | None:
        if not quantizable(linear, form):
            return None
        if form == NF4:
            return Nf4Linear(linear, device)
        if form == INT4:
            return Int4Linear(linear)
        return TwoDigitInt8Linear(linear.to(device)) if device.type == "cuda" else Int8Linear(linear)

    replace_linears(layers, replacement)


def require_available(form: str, device: torch.device) -> None:
    """Raise `InvalidOption` if this machine cannot compute with weights in `form`."""
    if form == NONE:
        return
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"--quant: weights are quantized on CPUs and CUDA devices, not on {device.type}; use none")
    if form == (INT4 if device.type == "cuda" else NF4):
        raise InvalidOption("4 bits are nf4 on a GPU and int4 on a CPU")
    if form == NF4 and find_spec("bitsandbytes") is None:
        raise InvalidOption("--quant nf4: GPUs need bitsandbytes for it; pip install bitsandbytes, or use int8 or none")
    if device.type == "cuda" and form == INT8 and not hasattr(torch, "_int_mm"):
        raise InvalidOption("--quant int8: this version of torch has no 8-bit products on GPUs; use nf4 or none")
    if device.type == "cpu" and form == INT4 and int4_layout() is None:
        raise InvalidOption(
            "--quant nf4: this version of torch packs 4-bit weights in an unknown way; use int8 or none"
        )
    if device.type == "cpu" and form == INT8 and not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        raise InvalidOption("--quant int8: this version of torch has no 8-bit products on CPUs; use none")


class Nf4Linear(FrozenLinear):
    """NF4. bitsandbytes quantizes while the weight moves to the device."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__(linear)
        import bitsandbytes as bnb

        weight, self.dtype = linear.weight.detach(), linear.weight.dtype
        inner: Any = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=self.dtype,
            quant_type="nf4",
            device="meta",
        )
        inner.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=inner
        )
        inner.bias = linear.bias
        self.bias: nn.Parameter | None = None  # the inner module adds it
        self.inner = inner.requires_grad_(False).to(device)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.inner(inputs))

    def dense(self) -> torch.Tensor:
        import bitsandbytes.functional as bnb

        weight = self.inner.weight
        return cast(torch.Tensor, bnb.dequantize_4bit(weight.data, weight.quant_state)).to(self.dtype)
