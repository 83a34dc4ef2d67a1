"""Weights held as a checkpoint stores them, in few bits, and the products with them.

A part of the rows is unpacked, multiplied while it is in the processor's cache, and forgotten. So the result is that of
the plain weight, in whatever dtype is computed in, and only the time differs. torch's kernel for 4 bits multiplies
without unpacking, and is faster than the plain product: on a CPU, in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from swarm.models.weights.frozen_linear import FrozenLinear, multiply
from swarm.models.weights.weight_only import Int4Linear, int4_layout

PIECE_VALUES = 1 << 21
"""About so many values are unpacked at a time, in float32. Smaller pieces were not faster, and all threads wait for
each other after each of its operations."""

ROWS = 32
"""The rows of a piece are a multiple of this: no word or byte holds values of two pieces."""

KERNEL_GROUPS = frozenset({32, 64, 128, 256})
"""The groups that torch's kernel for 4 bits knows."""

KERNEL_ROWS = 16
"""It wants a multiple of so many rows."""

FP4_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""The number for each code of 4 bits, in NVFP4 and MXFP4."""

Numbers = Callable[[torch.Tensor, slice], torch.Tensor]
"""Unpacks the stored numbers of some rows of one expert to float32, `[rows, columns]`, with memory of their own."""


class Grid(nn.Module):
    """The scales, zero points or biases of a weight.

    Attributes:
        values: [experts, rows of the grid, columns of the grid], in the dtype in which they are stored.
        height, width: the rows and the columns of the weight that share one.
        columns: the column of the grid for each column of the weight; None where they are in order.
        factor, divisor: what all values are multiplied and divided by.
    """

    def __init__(
        self,
        values: torch.Tensor,
        height: int,
        width: int,
        columns: torch.Tensor | None = None,
        factor: float = 1.0,
        divisor: float = 1.0,
    ) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)
        if columns is not None and not isinstance(columns, nn.Parameter):  # zero points share those of the scales
            columns = nn.Parameter(columns, requires_grad=False)
        self.columns = columns
        self.height, self.width, self.factor, self.divisor = height, width, factor, divisor

    def at(self, expert: int, rows: slice) -> torch.Tensor:
        """The values for some rows of the weight, `[rows or 1, columns of the grid]`, in float32."""
        first, last = rows.start // self.height, -(-rows.stop // self.height)
        found = self.values[expert, first:last].float()
        if self.factor != 1:
            found = found * self.factor
        if self.divisor != 1:
            found = found / self.divisor
        if self.height > 1 and last - first > 1:
            found = found.repeat_interleave(self.height, 0)[rows.start - first * self.height :][
                : rows.stop - rows.start
            ]
        return found if self.columns is None else found[:, self.columns]

    def apply_to(self, numbers: torch.Tensor, operation: str, expert: int, rows: slice) -> None:
        """Change `numbers`, `[rows, columns]`, in place by each one's own value; `operation` is mul, add or sub."""
        found, places = self.at(expert, rows), numbers
        if self.columns is None and numbers.shape[1] % self.width == 0:
            found, places = found[:, :, None], numbers.unflatten(1, (-1, self.width))
        elif self.columns is None:
            found = found.repeat_interleave(self.width, 1)[:, : numbers.shape[1]]
        getattr(places, f"{operation}_")(found)


class PackedWeight(nn.Module):
    """A weight, or those of several experts, in few bits: (number - zero) * scale + bias.

    Attributes:
        lead: sizes of the dimensions before the rows, empty or the number of experts.
        rows, columns: of one expert's weight, `[out_features, in_features]`.
        is_transposed: whether the family has it as `[in_features, out_features]`.
    """

    def __init__(
        self,
        data: torch.Tensor,
        numbers: Numbers,
        shape: Sequence[int],
        scales: Grid,
        *,
        zeros: Grid | float = 0.0,
        biases: Grid | None = None,
        rounded: torch.dtype = torch.float32,
        bits: int = 8,
        is_transposed: bool = False,
    ) -> None:
        """A weight from what is stored.

        Args:
            data: what `numbers` unpacks, `[experts, …]`.
            shape: of the plain weight before it is transposed.
            rounded: the dtype to which the format's own library rounds values.
            bits: 4 for integers of 0 to 15.
        """
        super().__init__()
        *lead, self.rows, self.columns = shape
        self.lead = tuple(lead)
        self.data = nn.Parameter(data, requires_grad=False)
        self.scales, self.zeros, self.biases = scales, zeros, biases
        self.numbers, self.rounded, self.bits, self.is_transposed = numbers, rounded, bits, is_transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the plain weight."""
        sizes = (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)
        return (*self.lead, *sizes)

    def unpacked(self, expert: int, rows: slice) -> torch.Tensor:
        """Some rows of an expert's weight, `[rows, columns]`."""
        found = self.numbers(self.data[expert], rows)
        if isinstance(self.zeros, Grid):
            self.zeros.apply_to(found, "sub", expert, rows)
        elif self.zeros:
            found.sub_(self.zeros)
        self.scales.apply_to(found, "mul", expert, rows)
        if self.biases is not None:
            self.biases.apply_to(found, "add", expert, rows)
        return found.to(self.rounded)

    def pieces(self) -> Iterator[slice]:
        """The rows that are unpacked at a time."""
        step = max(ROWS, PIECE_VALUES // self.columns // ROWS * ROWS)
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def fill(self, plain: torch.Tensor) -> None:
        """Write the weight to a tensor of its shape."""
        filled = (plain.mT if self.is_transposed else plain).view(-1, self.rows, self.columns)
        for expert, rows in itertools.product(range(len(filled)), self.pieces()):
            filled[expert, rows] = self.unpacked(expert, rows)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight."""
        plain = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        self.fill(plain)
        return plain

    def fits_kernel(self) -> bool:
        """Whether torch's kernel for 4 bits can multiply by it."""
        scales = self.scales
        return (
            self.bits == 4
            and (scales.height == 1 and scales.columns is None and scales.width in KERNEL_GROUPS)
            and (self.columns % scales.width == 0 and self.rows % KERNEL_ROWS == 0)
        )

    def int4_grid(self, expert: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [start, end) as `swarm.models.weights.weight_only.int4_grid` gives them."""
        rows = slice(start, end)
        scales = self.scales.at(expert, rows)
        zeros = self.zeros.at(expert, rows) if isinstance(self.zeros, Grid) else self.zeros
        offsets = (8 - zeros) * scales
        if self.biases is not None:
            offsets = offsets + self.biases.at(expert, rows)
        return self.numbers(self.data[expert], rows), scales, offsets


class PackedLinear(FrozenLinear):
    """A linear layer that holds a packed weight, or that of one of its experts."""

    def __init__(self, weight: PackedWeight, expert: int, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.dtype = linear.weight.dtype
        self.packed, self.expert = weight, expert

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.reshape(-1, self.in_features)
        result = tokens.new_empty(len(tokens), self.out_features)
        for rows in self.packed.pieces():
            part = self.packed.unpacked(self.expert, rows).to(inputs.dtype)
            result[:, rows] = multiply(tokens, part)
        if self.bias is not None:
            result += self.bias
        return result.view(*inputs.shape[:-1], self.out_features)

    def dense(self) -> torch.Tensor:
        return torch.cat([self.packed.unpacked(self.expert, rows).to(self.dtype) for rows in self.packed.pieces()])


class PackedExperts(nn.Module):
    """The weights of a mixture's experts, in place of the fused parameter: `experts[i]` multiplies as a tensor does.

    transformers' plain loop over the experts that tokens chose asks for them one by one.
    """

    def __init__(self, parts: Sequence[Sequence[FrozenLinear]]) -> None:
        """`parts[0][i]` gives the first rows of expert i's products, `parts[1][i]` those behind them."""
        super().__init__()
        self.parts = nn.ModuleList(map(nn.ModuleList, parts))

    def __getitem__(self, expert: Any) -> _Expert:
        index = int(expert)
        return _Expert([cast(nn.ModuleList, part)[index] for part in self.parts])  # type: ignore[misc]


class _Expert:
    """One expert's weight, which stands for a tensor in products with inputs, and in nothing else."""

    def __init__(self, parts: Sequence[FrozenLinear]) -> None:
        self.parts = parts

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        results = [part(inputs) for part in self.parts]
        return results[0] if len(results) == 1 else torch.cat(results, -1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].product(args[0])
        raise TypeError(f"packed experts are multiplied only, and {function} does something else")


_PRODUCTS = (functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
"""`linear` where a family has experts as [out, in], the others where it has them as [in, out]."""


def held(
    weight: PackedWeight, expert: int, bias: nn.Parameter | None, *, dtype: torch.dtype, device: torch.device
) -> FrozenLinear:
    """The layer that computes with a packed weight in `dtype` on `device`."""
    linear: Any = nn.Linear(weight.columns, weight.rows, False, "meta", dtype)
    linear.bias = bias
    is_fast = device.type == "cpu" and dtype is torch.bfloat16 and weight.fits_kernel() and int4_layout() is not None
    if is_fast:
        return Int4Linear(linear, lambda start, end: weight.int4_grid(expert, start, end), weight.scales.width)
    return PackedLinear(weight, expert, linear)


def fp8_numbers(data: torch.Tensor, rows: slice) -> torch.Tensor:
    """Of float8_e4m3fn or float8_e5m2 `[rows, columns]`, whose bits are moved to where float16 has them: torch's own
    conversion takes five times as long. NaN, which no weight is, becomes 480."""
    bits = data[rows].view(torch.int8).to(torch.int16)
    if data.dtype is torch.float8_e5m2:
        return bits.mul_(1 << 8).view(torch.float16).float()
    bits.mul_(1 << 7).bitwise_and_(-0x8000 | 0x3F80)  # products are vectorized, shifts are not
    return bits.view(torch.float16).float().mul_(256.0)  # float16 counts exponents from 15, float8 from 7


def fp4_numbers(data: torch.Tensor, rows: slice) -> torch.Tensor:
    """Of bytes `[rows, columns / 2]`, each with two: the lower four bits come first."""
    return _pairs(data[rows], _table("fp4", data.device))


def int8_numbers(data: torch.Tensor, rows: slice) -> torch.Tensor:
    return data[rows].float()


def word_numbers(data: torch.Tensor, rows: slice, bits: int, columns: int) -> torch.Tensor:
    """Of words of 32 bits `[rows, words]`."""
    return integers(data[rows], bits, columns)


def gptq_numbers(data: torch.Tensor, rows: slice, bits: int, columns: int) -> torch.Tensor:
    """Of words of 32 bits `[words, rows]`."""
    return integers(data[:, rows].T, bits, columns)


def awq_numbers(data: torch.Tensor, rows: slice) -> torch.Tensor:
    """Of words of 32 bits `[columns, rows / 8]`."""
    return awq_columns(data[:, rows.start // 8 : -(-rows.stop // 8)]).T.contiguous()


def integers(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` integers of each row of int32; they lie one after the other, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 4:
        return _pairs(data, _table("int4", data.device))[:, :count]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
        return ((data[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count].float()
    starts = torch.arange(count, device=data.device) * bits
    first = starts // 8
    pairs = data[:, first].int() | data[:, (first + 1).clamp(max=data.shape[1] - 1)].int() << 8
    return ((pairs >> (starts % 8).int()) & ((1 << bits) - 1)).float()


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """The integers of each row, in the order of the columns."""
    # A word holds columns 0, 2, 4, 6, 1, 3, 5, 7. Views, because a list of indices would be copied to a GPU each time.
    found: torch.Tensor = integers(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 2, 4))
    return found.mT.flatten(1)


def _pairs(data: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The two numbers of each byte `[rows, bytes]`."""
    return table.index_select(0, data.reshape(-1).int()).view(torch.float32).view(len(data), -1)


@cache
def _table(kind: str, device: torch.device) -> torch.Tensor:
    """Both numbers of each byte, two float32 side by side, which are copied as one int64."""
    values = FP4_VALUES if kind == "fp4" else [float(one) for one in range(16)]
    pairs = torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)], device="cpu")
    return pairs.view(torch.int64).view(-1).to(device)
