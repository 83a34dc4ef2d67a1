"""Weights in 8 and 4 bits: the forms, the memory that they take, and which layers hold them.

    none    the dtype that the server computes in
    int8    one scale for each output, weights only; with bitsandbytes on a GPU its LLM.int8, where inputs beyond a
            threshold are multiplied in 16 bits (Dettmers et al. 2022a, Petals section 3.1)
    nf4     with bitsandbytes on a GPU: its 4-bit NormalFloat, scales quantized too (Dettmers et al. 2023)
    int4    on a CPU, which has no fast kernels for NF4, and on a GPU without bitsandbytes: 16 evenly spaced values
            between the least and the greatest of each group of weights

Only plain linear layers are quantized; the fused experts of a mixture are not.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from swarm.common.trials import Trial
from swarm.errors import InvalidOption
from swarm.models.weights.bitsandbytes_linear import BitsAndBytesLinear
from swarm.models.weights.frozen_linear import replace_linears
from swarm.models.weights.gpu_linears import choose_kernel, gpu_linear
from swarm.models.weights.weight_only import INT4_GROUP_SIZE, Int4Linear, Int8Linear, int4_layout

NONE, INT8, NF4, INT4 = "none", "int8", "nf4", "int4"
QUANTIZATION_FORMS = frozenset({NONE, INT8, NF4, INT4})


def form_for_device(device: torch.device, requested: str) -> str:
    """The form in which `requested` ("none", "int8" or "nf4") is held on a device: without bitsandbytes on a GPU, 4
    bits are int4."""
    return INT4 if requested == NF4 and not _by_bitsandbytes(NF4, device) else requested


def _by_bitsandbytes(form: str, device: torch.device) -> bool:
    """Whether bitsandbytes holds weights in `form` on this device."""
    return device.type == "cuda" and form in (INT8, NF4) and find_spec("bitsandbytes") is not None


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
        if _by_bitsandbytes(form, device):
            return BitsAndBytesLinear(linear, "int8" if form == INT8 else "nf4", device)
        if device.type == "cuda":
            return gpu_linear(linear, form, device)
        return Int8Linear(linear) if form == INT8 else Int4Linear(linear)

    replace_linears(layers, replacement)


def require_available(form: str, device: torch.device) -> None:
    """Raise `InvalidOption` if this machine cannot compute with weights in `form`."""
    if form == NONE:
        return
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"--quant: weights are quantized on CPUs and CUDA devices, not on {device.type}; use none")
    if form == NF4 and not _by_bitsandbytes(NF4, device):
        raise InvalidOption("NF4 needs a CUDA device and bitsandbytes; pip install bitsandbytes, or use int4")
    if device.type == "cpu" and form == INT4 and int4_layout() is None:
        raise InvalidOption(
            "--quant nf4: this version of torch packs 4-bit weights in an unknown way; use int8 or none"
        )
    if device.type == "cpu" and form == INT8 and not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        raise InvalidOption("--quant int8: this version of torch has no 8-bit products on CPUs; use none")


def tried_products(out_features: int, in_features: int, device: torch.device) -> tuple[Trial, ...]:
    """How weights of a shape are multiplied in 8 and in 4 bits on a GPU, and why."""
    forms = (INT8, form_for_device(device, NF4))
    return tuple(
        trial
        for form in forms
        for trial in (
            (Trial(f"{form} by bitsandbytes", True, "it is installed"),)
            if _by_bitsandbytes(form, device)
            else choose_kernel(form, out_features, in_features, device).trials
        )
    )
