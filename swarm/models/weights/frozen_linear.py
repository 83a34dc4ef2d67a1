"""Linear layers whose weights never change, computed in the way that suits the CPU.

With AVX-512, weights are held in the layout that oneDNN computes with. With a plain `nn.Linear`, oneDNN rearranges the
weight for every product, or takes another path. Prepacked once, the same product is up to twice as fast
(`benchmarks/decoding/quantization.py`). With AVX2 only, weights stay as they are, and products of several tokens take
some rows of them at a time. Gradients flow to the inputs, never to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

PREPACKED_TOKENS = 128
"""Tokens that weights are prepacked for. oneDNN has two layouts: one for a single token, which is slower for more, and
one for everything else, which is the same from 4 tokens on and as good as the other for a single one."""

MIN_PRODUCT_TOKENS = 4
"""Tokens that a prepacked product gets at least, padded with zeros. So few tokens cost no more than reading the weight,
and oneDNN reads it slower for one token (by a quarter in fp32, a seventh in bfloat16) and for two (half, a third) than
for four."""

MIN_FP32_WEIGHTS = 1 << 18
"""Numbers in the smallest fp32 weight that is replaced. A call costs 8 us more than a plain one, which is not worth it
for a smaller weight that lies in the processor's cache. In 16 bits the plain call costs more, so all are replaced."""

CHUNK_ROWS = {torch.float32: 256, torch.bfloat16: 128, torch.float16: 128}
"""Rows of a weight that are multiplied at a time with AVX2 only. Those of 16 bits are converted to fp32, in cache."""

MAX_WHOLE_TOKENS = {torch.float32: 1, torch.bfloat16: 4, torch.float16: 4}
"""Tokens up to which the whole weight is multiplied as it is. With AVX2, for a weight of 4096 x 11008 and one thread,
chunks take 0.9 times as long for two tokens in fp32, 0.6 times for four and eight; in bfloat16, 0.55 times for eight
tokens, and 0.19 times for 64, which is as fast as with a weight in fp32."""


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

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the inputs, from that of the result."""
        return gradient @ self.dense().to(gradient.dtype)

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
        return ctx.module.input_gradient(gradient), None


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


class ChunkedLinear(FrozenLinear):
    """A linear layer on the CPU that multiplies several tokens with some rows of its weight at a time, in fp32.

    With AVX2 only, torch has no fast products in 16 bits, and oneDNN's layout is slow for a single token.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.held = nn.Parameter(linear.weight.detach(), requires_grad=False)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        result = _in_chunks(inputs, self.held)
        return result if self.bias is None else result.add_(self.bias)

    def dense(self) -> torch.Tensor:
        return self.held

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.held.dtype is torch.float32:
            return super().input_gradient(gradient)
        columns = gradient.split(CHUNK_ROWS[self.held.dtype], -1)
        result = sum(part.float() @ rows for part, rows in zip(columns, _wide_rows(self.held), strict=True))
        return cast(torch.Tensor, result).to(gradient.dtype)


def multiply(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`inputs @ weight.T` without gradients, for a weight that was made for this product."""
    if weight.device.type == "cpu" and weight.dtype in CHUNK_ROWS and _instructions() == "AVX2":
        return _in_chunks(inputs, weight)
    return functional.linear(inputs, weight)


def _in_chunks(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tokens = inputs.numel() // weight.shape[1]
    if tokens <= MAX_WHOLE_TOKENS[weight.dtype] or inputs.dtype is not weight.dtype:  # torch says what does not fit
        return functional.linear(inputs, weight)
    wide = inputs.float()
    return torch.cat([functional.linear(wide, rows) for rows in _wide_rows(weight)], -1).to(inputs.dtype)


def _wide_rows(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Some rows of a weight after the other, in fp32. The next ones may take the memory of those before."""
    chunks = weight.split(CHUNK_ROWS[weight.dtype])
    if weight.dtype is torch.float32:
        yield from chunks
        return
    buffer = torch.empty(chunks[0].shape)
    for rows in chunks:
        yield buffer[: len(rows)].copy_(rows)


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
    """Replace, in place, the plain linear layers on the CPU that become faster; plain weights are freed one by one.

    Subclasses of `nn.Linear` stay: they may read their weight in their own way.
    """
    replace_linears(layers, _faster)


def _faster(linear: nn.Linear) -> FrozenLinear | None:
    weight = linear.weight
    large = weight.dtype is not torch.float32 or weight.numel() >= MIN_FP32_WEIGHTS
    if weight.device.type != "cpu" or not large:
        return None
    if _instructions() == "AVX2":
        return ChunkedLinear(linear) if weight.dtype in MAX_WHOLE_TOKENS else None
    return PrepackedLinear(linear) if can_prepack(weight.dtype) else None


def _instructions() -> str:
    """Those that torch computes with on this CPU, such as AVX2 or AVX512."""
    return torch.backends.cpu.get_cpu_capability()


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
