"""Weights in 8 and 4 bits: the forms, the memory that they take, and which layers hold them.

    none    the dtype that the server computes in
    int8    on a CPU one scale for each output, weights only; on a GPU bitsandbytes' LLM.int8, which multiplies inputs
            beyond a threshold in 16 bits (Dettmers et al. 2022a, Petals section 3.1)
    nf4     on a GPU: bitsandbytes' 4-bit NormalFloat, scales quantized too (Dettmers et al. 2023)
    int4    on a CPU, which has no fast kernels for NF4: 16 evenly spaced values between the least and the greatest of
            each group of weights

Only plain linear layers are quantized; the fused experts of a mixture are not.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from torch import nn

from swarm.errors import InvalidOption
from swarm.models.weights.frozen_linear import FrozenLinear, replace_linears
from swarm.models.weights.weight_only import INT4_GROUP_SIZE, Int4Linear, Int8Linear, int4_layout

NONE, INT8, NF4, INT4 = "none", "int8", "nf4", "int4"
QUANTIZATION_FORMS = frozenset({NONE, INT8, NF4, INT4})

LLM_INT8_INPUT_THRESHOLD = 6.0
"""LLM.int8 multiplies inputs beyond it in 16 bits."""


def form_for_device(device: torch.device, requested: str) -> str:
    """The form in which `requested` ("none", "int8" or "nf4") is held on a device: 4 bits are nf4 on a GPU only."""
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
    """Replace, in place, the linear layers of `layers` by quantized ones on `device`.

    Raises `InvalidOption` if this machine cannot compute with them.
    """
    require_available(form, device)
    if form == NONE:
        return

    def replacement(linear: nn.Linear) -> nn.Module | None:
        if not quantizable(linear, form):
            return None
        if device.type == "cuda":
            return BitsAndBytesLinear(linear, "int8" if form == INT8 else "nf4", device)
        return Int8Linear(linear) if form == INT8 else Int4Linear(linear)

    replace_linears(layers, replacement)


def require_available(form: str, device: torch.device) -> None:
    """Raise `InvalidOption` if this machine cannot compute with weights in `form`."""
    if form == NONE:
        return
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"--quant: weights are quantized on CPUs and CUDA devices, not on {device.type}; use none")
    if device.type == "cuda" and find_spec("bitsandbytes") is None:
        raise InvalidOption(f"--quant {form}: GPUs need bitsandbytes for it; pip install bitsandbytes, or use none")
    if form == (INT4 if device.type == "cuda" else NF4):
        raise InvalidOption("4 bits are nf4 on a GPU and int4 on a CPU")
    if device.type == "cpu" and form == INT4 and int4_layout() is None:
        raise InvalidOption(
            "--quant nf4: this version of torch packs 4-bit weights in an unknown way; use int8 or none"
        )
    if device.type == "cpu" and form == INT8 and not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        raise InvalidOption("--quant int8: this version of torch has no 8-bit products on CPUs; use none")


class BitsAndBytesLinear(FrozenLinear):
    """LLM.int8 or NF4. bitsandbytes quantizes while the weight moves to the device."""

    def __init__(self, linear: nn.Linear, form: Literal["int8", "nf4"], device: torch.device) -> None:
        super().__init__(linear)
        import bitsandbytes as bnb

        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        weight, dtype = linear.weight.detach(), linear.weight.dtype
        inner: Any
        if form == "int8":
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
        self.rounds_inputs = form == "int8"
        self.bias: nn.Parameter | None = None  # the inner module adds it
        self.inner = inner.requires_grad_(False).to(device)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.inner(inputs))

    def dense(self) -> torch.Tensor:
        import bitsandbytes.functional as bnb

        weight = self.inner.weight
        if self.form == "nf4":
            return cast(torch.Tensor, bnb.dequantize_4bit(weight.data, weight.quant_state)).to(self.dtype)
        # The first product moves the scales from the weight to the module's state.
        scales = weight.SCB if weight.SCB is not None else self.inner.state.SCB
        return cast(torch.Tensor, weight.data * (scales / 127).unsqueeze(1)).to(self.dtype)
