"""Linear layers whose weights are held in 8 or 4 bits, with torch's own kernels.

On a CPU, kernels multiply few tokens by the packed weights. For many tokens a plain product in bfloat16 is faster, so
the weight is unpacked part by part, and each part is multiplied while it is in the processor's cache. Both ways round
the inputs to bfloat16. On a GPU, weights in 8 bits are multiplied by inputs of two 8-bit digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import cast

import torch
from torch import nn

from swarm.models.weights.frozen_linear import FrozenLinear, multiply

INT4_GROUP_SIZE = 64
"""Weights that share a scale and an offset in int4."""

UNPACKED_PART_WEIGHTS = 1 << 20
"""Weights that are unpacked at once, few enough to stay in the processor's cache until they are multiplied."""

DIGIT_BASE = 254
"""Of inputs on a GPU: what remains of a number of -127 to 127 such units is between -127 and 127."""

MIN_INT8_ROWS = 32
"""Rows of an 8-bit product on a GPU; torch wants more than 16."""

TOKENS_OF_DIGITS = 512
"""Tokens multiplied at once on a GPU, because their products take 8 bytes an output."""


class WeightOnlyLinear(FrozenLinear):
    """A linear layer with packed weights: a kernel for few tokens, unpacking by parts for many."""

    rounds_inputs = True
    PART_WEIGHTS = UNPACKED_PART_WEIGHTS

    max_kernel_tokens: int
    """The largest batch for which the kernel on packed weights is faster."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.dtype = linear.weight.dtype

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        kernel = 0 < len(tokens) <= self.max_kernel_tokens
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
        rows = max(64, self.PART_WEIGHTS // self.in_features // 64 * 64)
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


class Int8Linear(WeightOnlyLinear):
    """8 bits a weight, symmetric, one scale an output."""

    max_kernel_tokens = 12

    @torch.no_grad()
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values = torch.empty_like(linear.weight, dtype=torch.int8)
        scales = torch.empty(self.out_features, dtype=torch.bfloat16, device=values.device)
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
        torch.mul(multiply(tokens, self.values[start:end].to(tokens.dtype)), self.scales[start:end], out=result)


class TwoDigitInt8Linear(Int8Linear):
    """8 bits a weight on a GPU, which multiplies numbers of 8 bits fast and exactly.

    An input becomes a number of two digits from -127 to 127, so it is rounded to a 64,000th of the token's largest
    input. That keeps what a bfloat16 says of all inputs but those that are far smaller than the largest, so outliers
    need no path of their own as in LLM.int8 (Dettmers et al. 2022a), and nothing waits for the GPU in between.
    """

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs.reshape(-1, self.in_features).float()
        parts = [self._multiply_digits(part) for part in tokens.split(TOKENS_OF_DIGITS)]
        result = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.bias is not None:
            result += self.bias
        return result.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def _multiply_digits(self, tokens_TI: torch.Tensor) -> torch.Tensor:
        tokens = len(tokens_TI)
        if not tokens:
            return tokens_TI.new_empty(0, self.out_features)
        units_T1 = tokens_TI.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30).div_(DIGIT_BASE * 127)
        low_TI = (tokens_TI / units_T1).round_()
        high_TI = (low_TI / DIGIT_BASE).round_()
        digits = self.values.new_empty(max(2 * tokens, MIN_INT8_ROWS), self.in_features)
        digits[:tokens] = high_TI
        digits[tokens : 2 * tokens] = low_TI.sub_(high_TI, alpha=DIGIT_BASE)
        products = torch._int_mm(digits, self.values.t())
        high_TO, low_TO = products[: 2 * tokens].float().split(tokens)
        return cast(torch.Tensor, high_TO.mul_(DIGIT_BASE).add_(low_TO).mul_(self.scales).mul_(units_T1))


def int4_grid(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The evenly spaced values nearest to a weight, `[out, in]`: `(level - 8) * scale + offset`.

    Returns:
        levels 0 to 15, `[out, in]`; scales and offsets of the groups, `[out, groups]`, rounded to bfloat16. All fp32.
    """
    weight_OGK = weight.to(torch.float32, copy=True).unflatten(1, (-1, INT4_GROUP_SIZE))
    least, greatest = weight_OGK.aminmax(dim=2)
    scales_OG = ((greatest - least) / 15).clamp_(min=1e-9).bfloat16().float()
    offsets_OG = (least + 8 * scales_OG).bfloat16().float()
    weight_OGK.sub_(offsets_OG.unsqueeze(2)).div_(scales_OG.unsqueeze(2)).round_().add_(8).clamp_(0, 15)
    return weight_OGK.flatten(1), scales_OG, offsets_OG


class Int4Linear(WeightOnlyLinear):
    """4 bits a weight on a CPU: one scale and one offset (bfloat16) for each group of weights."""

    max_kernel_tokens = 64

    @torch.no_grad()
    def __init__(
        self,
        linear: nn.Linear,
        grid: Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
        group_size: int = INT4_GROUP_SIZE,
    ) -> None:
        """`grid(start, end)` is the `int4_grid` of rows [start, end) where they have one already."""
        super().__init__(linear)
        self.group_size = group_size
        groups = self.in_features // group_size
        values = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8)
        scales_GO2 = torch.empty(groups, self.out_features, 2, dtype=torch.bfloat16)
        for start, end in self._part_bounds():  # torch packs blocks of 64 rows, so parts can be packed alone
            levels, scales_OG, offsets_OG = grid(start, end) if grid else int4_grid(linear.weight[start:end])
            values[start:end] = _pack_int4(levels.to(torch.int32))
            scales_GO2[:, start:end] = torch.stack([scales_OG.T, offsets_OG.T], dim=2)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales_GO2, requires_grad=False)

    def _multiply_packed(self, tokens: torch.Tensor) -> torch.Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        return cast(torch.Tensor, multiply(tokens, self.values, self.group_size, self.scales))

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
        layout = int4_layout()
        assert layout is not None
        half, groups = self.in_features // 2, self.in_features // self.group_size
        for levels_BIR in _unpack_int4(self.values.view(-1)[start * half : end * half], end - start, *layout):
            blocks, _, rows = levels_BIR.shape
            scales_GO2 = self.scales[:, start : start + blocks * rows]
            scales_BGR, offsets_BGR = scales_GO2.view(groups, blocks, rows, 2).permute(3, 1, 0, 2).contiguous()
            weight = levels_BIR.to(torch.bfloat16).sub_(8).view(blocks, groups, self.group_size, rows)
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
def int4_layout() -> tuple[int, bool] | None:
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
