"""LLM.int8 and NF4, as bitsandbytes computes them."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import nn

from swarm.models.weights.frozen_linear import FrozenLinear

LLM_INT8_INPUT_THRESHOLD = 6.0
"""LLM.int8 multiplies inputs beyond it in 16 bits."""


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
