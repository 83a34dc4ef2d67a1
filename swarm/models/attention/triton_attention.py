"""Attention over pages written in Triton, for GPUs whose torch has no kernel that reads pages (before 2.13).

One program attends for some rows of one sequence and one head of keys: the heads that share these keys are rows beside
each other, so keys are read once for all of them (grouped-query attention). The positions that a sequence has are
divided among several programs where there would else be too few to occupy the GPU, and a second kernel joins their
results: "FlashDecoding", after the online softmax of Dao 2022 ("FlashAttention", section 3.1) and Milakov and
Gimelshein 2018.

Triton comes with torch's builds for CUDA. With TRITON_INTERPRET=1 in the environment, before this module is imported,
it interprets the kernels on a CPU, slowly.

Shapes: T tokens of N sequences, Hq heads that share Hkv keys, D wide, P pages of S positions each, X parts.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

from swarm.common.machine import multiprocessors
from swarm.models.attention.paged_kernels import Window

LOG2_E = 1.4426950408889634

ROWS_OF_A_TOKEN = 16
"""Rows of a program where each sequence brings one token: the fewest that matrix units multiply."""

ROWS_OF_A_PROMPT = 64
STEP_POSITIONS = 64
"""Positions that a program reads at once. It divides the positions of a page."""

WIDE_HEAD_BYTES = 512
"""Keys of more bytes, such as 256 numbers in float32, are read and multiplied fewer at once: queries, keys and values
of a program lie in a multiprocessor's shared memory, of which a program may have 163 KiB on an A100."""

PROGRAMS_PER_PROCESSOR = 4
"""Programs to start for each of the GPU's multiprocessors, if there are enough positions."""

MIN_PART_POSITIONS = 256
MAX_PARTS = 64


@triton.jit
def _attend(
    query, keys, values, output, log_sums, bounds, lengths, table,
    scale_log2, left,
    query_token, query_head, page_stride, position_stride, head_stride, table_stride, output_part, sums_part,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Outputs of ROWS rows (tokens x GROUP heads) over one part of the positions; normalized within the part."""
    tile, pair, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, head = pair // HEADS, pair % HEADS
    first = tl.load(bounds + sequence)
    new = tl.load(bounds + sequence + 1) - first
    if tile * ROWS >= new * GROUP:
        return
    length = tl.load(lengths + sequence)

    row = tile * ROWS + tl.arange(0, ROWS)
    token, member = row // GROUP, row % GROUP
    present = token < new
    position = length - new + token
    wide = tl.arange(0, PADDED)
    place = (first + token).to(tl.int64)[:, None] * query_token + (head * GROUP + member)[:, None] * query_head
    inside = present[:, None] & (wide < WIDE)[None, :]
    rows = tl.load(query + place + wide[None, :], mask=inside, other=0.0)

    # What the rows of this program see: whole steps of positions, divided among the parts.
    low, high = 0, length
    if CAUSAL:
        high = tl.minimum(length, length - new + (tile * ROWS + ROWS - 1) // GROUP + 1)
    if WINDOWED:
        low = tl.maximum(0, length - new + tile * ROWS // GROUP - left) // STEP * STEP
    share = tl.cdiv(tl.cdiv(high - low, STEP), PARTS) * STEP
    begin = low + part * share
    end = tl.minimum(high, begin + share)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(begin, end, STEP):
        page = tl.load(table + sequence * table_stride + start // PAGE).to(tl.int64)
        step = tl.arange(0, STEP)
        other = start + step
        kept = page * page_stride + head * head_stride + (start % PAGE + step)[:, None] * position_stride
        known = (other < length)[:, None] & (wide < WIDE)[None, :]
        key = tl.load(keys + kept + wide[None, :], mask=known, other=0.0)
        value = tl.load(values + kept + wide[None, :], mask=known, other=0.0)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale_log2
        seen = (other < high)[None, :]
        if CAUSAL:
            seen = seen & (other[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (position[:, None] - other[None, :] <= left)
        scores = tl.where(seen, scores, float("-inf"))
        greatest = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = greatest

    total = tl.where(total == 0.0, 1.0, total)  # of rows that see nothing in this part; their maximum is -inf
    result = result / total[:, None]
    heads = (first + token).to(tl.int64) * (HEADS * GROUP) + head * GROUP + member
    tl.store(output + part * output_part + heads[:, None] * WIDE + wide[None, :], result, mask=inside)
    if PARTS > 1:
        tl.store(log_sums + part * sums_part + heads, maximum + tl.log2(total), mask=present)


@triton.jit
def _join(
    parts, log_sums, output, part_stride, sums_stride,
    WIDE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
):  # fmt: skip
    """The output of one head of one token from its parts, each weighted by its share of the softmax's sum."""
    head = tl.program_id(0).to(tl.int64)
    part, wide = tl.arange(0, PARTS_PADDED), tl.arange(0, PADDED)
    sums = tl.load(log_sums + part * sums_stride + head, mask=part < PARTS, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    inside = (part < PARTS)[:, None] & (wide < WIDE)[None, :]
    results = tl.load(parts + part[:, None] * part_stride + head * WIDE + wide[None, :], mask=inside, other=0.0)
    joined = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + head * WIDE + wide, joined, mask=wide < WIDE)


def triton_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: Window,
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """A `PagedKernel` for float32, float16 and bfloat16. Reads nothing from the GPU, so that it can be recorded.

    `num_splits` and `cu_seq_k` are not used: it splits as it needs to. Raises `ValueError` for a window to the right.
    """
    (_, heads, wide), (_, page, shared, _) = query.shape, key.shape
    left, right = window_size
    if right not in (-1, 0) or (right == -1 and left != -1) or page % STEP_POSITIONS or key.stride() != value.stride():
        raise ValueError(f"attention in Triton knows causal windows over pages of {STEP_POSITIONS} positions or more")
    group, sequences = heads // shared, len(seqused_k)
    padded = max(16, triton.next_power_of_2(wide))
    rows, step = tile_size(max_q * group, padded * key.element_size())
    tiles = triton.cdiv(max_q * group, rows)
    parts = number_of_parts(tiles * sequences * shared, max_k, multiprocessors(query.device))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial, log_sums = output, output
    if parts > 1:
        partial = output.new_empty((parts, *query.shape), dtype=torch.float32)
        log_sums = output.new_empty((parts, *query.shape[:2]), dtype=torch.float32)
    _attend[(tiles, sequences * shared, parts)](
        query, key, value, partial, log_sums, cu_seq_q, seqused_k, block_table,
        (scale if scale is not None else wide**-0.5) * LOG2_E, left,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), key.stride(2), block_table.stride(0),
        output.numel(), query.shape[0] * heads,
        HEADS=shared, GROUP=group, WIDE=wide, PADDED=padded,
        PAGE=page, ROWS=rows, STEP=step, PARTS=parts, CAUSAL=right == 0, WINDOWED=left >= 0,
    )  # fmt: skip
    if parts > 1:
        _join[(query.shape[0] * heads,)](
            partial, log_sums, output, output.numel(), query.shape[0] * heads,
            WIDE=wide, PADDED=padded, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts),
        )  # fmt: skip
    return output


def tile_size(rows: int, head_bytes: int) -> tuple[int, int]:
    """How many rows a program computes, and how many positions it reads at once.

    Args:
        rows: of a sequence, tokens times heads that share keys.
        head_bytes: of a head's key.
    """
    shrunk = max(1, head_bytes // WIDE_HEAD_BYTES)
    few = rows <= ROWS_OF_A_TOKEN
    return ROWS_OF_A_TOKEN if few else max(16, ROWS_OF_A_PROMPT // shrunk), max(16, STEP_POSITIONS // shrunk)


def number_of_parts(programs: int, positions: int, processors: int) -> int:
    """Into how many parts to divide the positions: a power of two, so that few variants are compiled."""
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // programs, positions // MIN_PART_POSITIONS, MAX_PARTS)
    return 1 << max(0, wanted.bit_length() - 1)
