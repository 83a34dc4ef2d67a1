"""Products of few tokens with packed weights, written in Triton: the weights are unpacked in registers.

A step of single tokens takes as long as reading the weights, and packed ones are read in a half or a quarter of the
time. Each program multiplies some tokens by some rows of the weight; there are as many programs as occupy the GPU.

Triton comes with torch's builds for CUDA. With TRITON_INTERPRET=1 in the environment, before this module is imported,
it interprets the kernel on a CPU, slowly.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from swarm.common.machine import multiprocessors
from swarm.models.weights.weight_only import INT4_GROUP_SIZE

FEW_TOKENS, MANY_TOKENS = 16, 64
"""Tokens of a program: the fewest that matrix units multiply, and as many as are worth it. No sizes in between, each of
which would be compiled when it first occurs, while clients wait."""

ROWS = (64, 32, 16)
"""Rows of the weight that a program multiplies: the first of them that makes enough programs."""

PROGRAMS_PER_PROCESSOR = 2
STEPS = (128, 256)
"""Inputs that a program may multiply at once. Longer steps keep more reads on their way, and take more registers."""


@triton.jit
def _restored(levels, scales, offsets, ROWS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Weights of the levels 0 to 15 of some groups, `[ROWS, GROUPS * HALF]`, fp32."""
    by_group = tl.reshape(levels.to(tl.float32) - 8.0, [ROWS, GROUPS, HALF])
    return tl.reshape(by_group * scales[:, :, None] + offsets[:, :, None], [ROWS, GROUPS * HALF])


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    inputs, values, scales, output,
    tokens, rows, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Products of TOKENS tokens with ROWS rows of a weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    PER_BYTE: tl.constexpr = 8 // BITS
    step = tl.arange(0, STEP // PER_BYTE)
    here, of_token = row < rows, token < tokens
    bytes_of_row = row.to(tl.int64)[:, None] * (width // PER_BYTE)
    inputs_of_token = token.to(tl.int64)[:, None] * width
    result = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, width, STEP):
        place = start // PER_BYTE + step
        inside = place < width // PER_BYTE
        packed = tl.load(values + bytes_of_row + place[None, :], mask=here[:, None] & inside[None, :], other=0)
        known = of_token[:, None] & inside[None, :]
        first = tl.load(inputs + inputs_of_token + PER_BYTE * place[None, :], mask=known, other=0.0)
        if BITS == 8:
            result += tl.dot(first, tl.trans(packed.to(first.dtype)), input_precision="ieee")
        else:
            second = tl.load(inputs + inputs_of_token + PER_BYTE * place[None, :] + 1, mask=known, other=0.0)
            group = start // GROUP + tl.arange(0, STEP // GROUP)
            of_group = row.to(tl.int64)[:, None] * (width // GROUP) + group[None, :]
            there = here[:, None] & (group < width // GROUP)[None, :]
            scale = tl.load(scales + of_group, mask=there, other=0.0).to(tl.float32)
            offset = tl.load(scales + rows * (width // GROUP) + of_group, mask=there, other=0.0).to(tl.float32)
            low = _restored(packed & 15, scale, offset, ROWS, STEP // GROUP, GROUP // 2)
            high = _restored(packed >> 4, scale, offset, ROWS, STEP // GROUP, GROUP // 2)
            result += tl.dot(first, tl.trans(low.to(first.dtype)), input_precision="ieee")
            result += tl.dot(second, tl.trans(high.to(second.dtype)), input_precision="ieee")
    if BITS == 8:
        result = result * tl.load(scales + row, mask=here, other=0.0).to(tl.float32)[None, :]
    to = token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(output + to, result, mask=of_token[:, None] & here[None, :])


def multiply(tokens: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, step: int = STEPS[0]) -> torch.Tensor:
    """Products of tokens `[tokens, in]` with a packed weight, `[tokens, out]` in the tokens' dtype.

    Args:
        values: int8 `[out, in]`, or uint8 `[out, in / 2]` with two neighbors of 4 bits a byte, the first one low.
        scales: of int8 `[out]`; of 4 bits scales and offsets of the groups, `[2, out, groups]`.
        step: one of `STEPS`, for few tokens.

    Raises `ValueError` if tokens and weight do not fit together.
    """
    count, width = tokens.shape
    rows, bits = len(values), 8 if values.dtype is torch.int8 else 4
    if values.shape[1] * 8 // bits != width or not (tokens.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"tokens of {width} inputs cannot be multiplied by values {tuple(values.shape)}")
    output = torch.empty(count, rows, dtype=tokens.dtype, device=tokens.device)
    tile, step = (FEW_TOKENS, step) if count <= FEW_TOKENS else (MANY_TOKENS, STEPS[0])
    tiles = triton.cdiv(count, tile)
    rows_of_program = rows_per_program(rows, tiles, multiprocessors(tokens.device))
    _multiply[(triton.cdiv(rows, rows_of_program), tiles)](
        tokens, values, scales, output, count, rows, width,
        BITS=bits, GROUP=INT4_GROUP_SIZE, TOKENS=tile, ROWS=rows_of_program, STEP=step,
    )  # fmt: skip
    return output


def rows_per_program(rows: int, tiles: int, processors: int) -> int:
    """How many rows of a weight a program multiplies, so that there are enough programs."""
    enough = PROGRAMS_PER_PROCESSOR * processors
    return next((few for few in ROWS if triton.cdiv(rows, few) * tiles >= enough), ROWS[-1])
