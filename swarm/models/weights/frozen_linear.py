"""Linear layers whose weights never change: on a CPU they are held in the layout that oneDNN computes with.

With a plain `nn.Linear`, oneDNN rearranges the weight for every product, or takes another path. Prepacked once, the
same product is up to twice as fast (`benchmarks/decoding/quantization.py`). Gradients flow to the inputs, never to the
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

PREPACKED_TOKENS = 128
"""Tokens that weights are prepacked for. oneDNN has two layouts: one for a single token, which is slower for more, and
one for everything else, which is the same from 4 tokens on and as good as the other for a single one."""

MIN_PRODUCT_TOKENS = 4
"""Tokens that a product gets at least, padded with zeros. So few tokens cost no more than reading the weight, and
oneDNN reads it slower for one token (by a quarter in fp32, a seventh in bfloat16) and for two (half, a third) than for
four."""

MIN_PREPACKED_FP32_WEIGHTS = 1 << 18
"""Numbers in the smallest fp32 weight that is prepacked. A call costs 8 us more than a plain one, which is not worth it
for a smaller weight that lies in the processor's cache. In bfloat16 the plain call costs more, so all are prepacked."""


class FrozenLinear(nn.Module):
    """`x @ weight.T + bias` for a weight that is held in a special form.

    Subclasses implement the product (`product`) and restore the plain weight (`dense`).

    Attributes:
        rounds_inputs: whether the product rounds its inputs to fewer bits than they have.

    Shapes: any number of dimensions in front, `[..., in_features]` to `[..., out_features]`.
    """

    rounds_inputs = False

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: nn.Parameter | None = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, restored for this call. A family that reads it gets the right numbers, slowly."""
        return self.dense()

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """The result for inputs, without gradients."""
        raise NotImplementedError

    def dense(self) -> torch.Tensor:
        """`[out_features, in_features]`, in the dtype it computes in."""
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if has_torch_function_unary(inputs):  # what records torch's calls sees this one, as that of a plain layer
            return handle_torch_function(self.forward, (inputs,), inputs)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and inputs.requires_grad:
            result: torch.Tensor = _WithInputGradient.apply(inputs, self)
            return result
        return self.product(inputs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _WithInputGradient(torch.autograd.Function):
    """A frozen product whose gradient goes to its inputs. Keeps only the module."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, module: FrozenLinear) -> torch.Tensor:
        ctx.module = module
        return module.product(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.module.dense().to(gradient.dtype), None


class PrepackedLinear(FrozenLinear):
    """A linear layer on the CPU whose weight is held in oneDNN's layout only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        prepacked = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PREPACKED_TOKENS)
        self.prepacked = nn.Parameter(prepacked, requires_grad=False)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.numel() // self.in_features
        if 0 < tokens < MIN_PRODUCT_TOKENS:
            padded = inputs.new_zeros(MIN_PRODUCT_TOKENS, self.in_features)
            padded[:tokens] = inputs.reshape(tokens, self.in_features)
            return self._multiplied(padded)[:tokens].view(*inputs.shape[:-1], self.out_features)
        return self._multiplied(inputs)

    def dense(self) -> torch.Tensor:
        return self.prepacked.to_dense()

    def _multiplied(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            inputs, self.prepacked, self.bias, "none", [], ""
        )
        return result


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this machine's processor and torch compute prepacked products in `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        PrepackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (RuntimeError, AttributeError):  # the processor lacks the instructions, or torch the functions
        return False
    return True


def prepack(layers: nn.Module) -> None:
    """Prepack, in place, the plain linear layers on the CPU that become faster; plain weights are freed one by one.

    Subclasses of `nn.Linear` stay: they may read their weight in their own way.
    """
    replace_linears(layers, lambda linear: PrepackedLinear(linear) if _gains(linear) else None)


def _gains(linear: nn.Linear) -> bool:
    weight = linear.weight
    large = weight.dtype is not torch.float32 or weight.numel() >= MIN_PREPACKED_FP32_WEIGHTS
    return weight.device.type == "cpu" and large and can_prepack(weight.dtype)


def replace_linears(layers: nn.Module, replacement: Callable[[nn.Linear], nn.Module | None]) -> None:
    """Replace every plain `nn.Linear` by what `replacement` returns for it; None leaves it.

    A linear layer that stands in several places is replaced by one module in all of them.
    """
    for places in _plain_linears(layers):
        parent, name = places[0]
        new = replacement(getattr(parent, name))
        if new is not None:
            for parent, name in places:
                setattr(parent, name, new)


def _plain_linears(layers: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each plain linear layer stands. Only these places refer to the layer, so its weight is freed with them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in layers.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.Linear:
                places.setdefault(id(child), []).append((parent, name))
    return list(places.values())
