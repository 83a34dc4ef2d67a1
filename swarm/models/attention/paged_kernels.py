"""Attention over a pool of pages in one call for all sequences of a batch: torch's kernel and its reference.

The kernel is `torch.nn.attention.varlen.varlen_attn` with a block table (Kwon et al. 2023, "Efficient memory management
for large language model serving with PagedAttention"), which torch has from 2.13 on, or one of our own in Triton. The
reference is the same function written out. A CPU has no such kernel and computes with the reference. A kernel is only
used if it agrees with the reference, and of several the fastest is.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.nn import functional

Window = tuple[int, int]
"""Positions that a token sees to its left and to its right, besides itself; -1 for any number."""

MAX_RELATIVE_ERROR = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Error of a kernel's outputs relative to their norm."""


TIMED_SEQUENCES, TIMED_PAGES, TIMED_RUNS = 8, 8, 5
"""Sequences and pages of each in a step whose time is measured, and how often it runs."""


class PagedKernel(Protocol):
    """Attention of packed queries over pages."""

    def __call__(
        self,
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
    ) -> Any:
        """Outputs `[T, Hq, D]`.

        Shapes: T tokens of N sequences, Hq heads that share Hkv keys, D wide, P pages of S positions each.

        Args:
            query: `[T, Hq, D]`, one sequence after the other, each of which ends with its last new token.
            key, value: `[P, S, Hkv, D]`.
            cu_seq_q: int32 `[N + 1]`, where each sequence's tokens begin, and where the last one's end.
            cu_seq_k: not used with pages.
            max_q, max_k: the largest number of tokens and of positions of a sequence.
            seqused_k: int32 `[N]`, positions of each sequence.
            block_table: int32 `[N, ...]`, the pages of each sequence in order; what is behind the last one is not read.
            num_splits: 1. FlashAttention 2 writes wrong results if it splits a sequence (pytorch issue 194167).
        """


def candidate_kernels(device: torch.device) -> tuple[PagedKernel, ...]:
    """Kernels that a device may have. Raises `ImportError` if this torch has none for it."""
    if device.type != "cuda":
        return (reference_kernel,)
    found: list[PagedKernel] = []
    missing: list[str] = []
    for source in (_kernels_of_torch, _kernels_of_triton):
        try:
            found += source()
        except ImportError as error:
            missing.append(str(error))
    if not found:
        raise ImportError("; ".join(missing))
    return tuple(found)


def _kernels_of_triton() -> tuple[PagedKernel, ...]:
    if find_spec("triton") is None:
        raise ImportError("Triton is not installed")
    from swarm.models.attention.triton_attention import triton_kernel  # late: it takes a second, and needs a GPU

    return (triton_kernel,)


def _kernels_of_torch() -> tuple[PagedKernel, ...]:
    from torch.nn.attention.varlen import varlen_attn  # late, for the same reason; torch 2.8 has no such module

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ImportError("torch before 2.13 reads no pages")

    def with_bounds_of_keys(*args: Any, **kwargs: Any) -> Any:
        """FlashAttention 3 refuses `cu_seq_k` beside pages; FlashAttention 2 requires it, but uses `seqused_k`."""
        query, key, value, cu_seq_q, _, *rest = args
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_q, *rest, **kwargs)

    return varlen_attn, with_bounds_of_keys


def reference_kernel(
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
    """A `PagedKernel` that computes one sequence after the other, in any dtype and on any device.

    Raises `ValueError` where a kernel would refuse, or would read memory that is not there.
    """
    bounds, lengths, tables = cu_seq_q.tolist(), seqused_k.tolist(), block_table.tolist()
    if any(one.dtype is not torch.int32 for one in (cu_seq_q, seqused_k, block_table)):
        raise ValueError("bounds, lengths and the block table have to be int32")
    if query.shape[1] % key.shape[2] or (query.shape[1] != key.shape[2] and not enable_gqa):
        raise ValueError(f"{query.shape[1]} heads cannot share {key.shape[2]} keys")
    if not len(bounds) - 1 == len(lengths) == len(tables) or (bounds[0], bounds[-1]) != (0, len(query)):
        raise ValueError("sequences, their tokens and their pages do not fit together")
    output = torch.empty_like(query)
    for first, end, length, table in zip(bounds, bounds[1:], lengths, tables, strict=False):
        if not (first <= end <= first + min(max_q, length) and length <= max_k):
            raise ValueError("a sequence is longer than max_k, or brings more tokens than max_q or its positions allow")
        pages = table[: -(-length // key.shape[1])]
        if length > len(table) * key.shape[1] or any(not 0 <= page < len(key) for page in pages):
            raise ValueError("the block table names pages that do not exist, or too few")
        if first < end:
            output[first:end] = _attend_sequence(
                query[first:end], key, value, pages, length, scale, window_size, enable_gqa
            )
    return output


def agrees_with_reference(kernel: PagedKernel, pages: torch.Tensor) -> bool:
    """Whether a kernel computes what the reference does, for pages like those of a model, `[pages, page, heads, dim]`.

    Tries sequences that begin, continue, and bring one token, over several pages, with and without a window. Trials of
    whole models are far shorter than real windows, so they would not notice a kernel that ignores windows.
    """
    _, page, heads, dim = pages.shape
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(pages.device, pages.dtype)

    def integers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pages.device)

    keys, values = noise(6, page, heads, dim), noise(6, page, heads, dim)
    lengths, table = integers(page + 3, 2 * page, page), integers((4, 1), (2, 5), (3, 0))
    for news in ((1, 1, 1), (1, 6, page)):
        query, bounds = noise(sum(news), 2 * heads, dim), integers(0, *itertools.accumulate(news))
        for window in ((-1, 0), (page // 2, 0), (3, 0)):
            outputs = [
                one(
                    query, keys, values, bounds, None, max(news), 2 * page, scale=None, window_size=window,
                    enable_gqa=True, seqused_k=lengths, block_table=table, num_splits=1,
                ).float()
                for one in (kernel, reference_kernel)
            ]  # fmt: skip
            error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
            if not error < MAX_RELATIVE_ERROR.get(pages.dtype, 1e-4):  # also if it is not a number
                return False
    return True


def step_seconds(kernel: PagedKernel, pages: torch.Tensor, query_heads: int) -> float:
    """Seconds of a step of single tokens, over pages like these, on their device.

    Args:
        pages: `[pages, page, heads, dim]`, for the shape of a page only.
        query_heads: a multiple of the heads of a page.
    """
    _, page, heads, dim = pages.shape
    count = 1 + TIMED_SEQUENCES * TIMED_PAGES
    keys, values = (pages.new_zeros(count, page, heads, dim) for _ in range(2))

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pages.device)

    query, bounds = pages.new_zeros(TIMED_SEQUENCES, query_heads, dim), integers(*range(TIMED_SEQUENCES + 1))
    longest = TIMED_PAGES * page
    lengths = integers(*[longest] * TIMED_SEQUENCES)
    table = integers(*range(1, count)).view(TIMED_SEQUENCES, TIMED_PAGES)

    times = []
    for _ in range(1 + TIMED_RUNS):
        began = time.perf_counter()
        kernel(
            query, keys, values, bounds, None, 1, longest, scale=None, window_size=(-1, 0),
            enable_gqa=query_heads != heads, seqused_k=lengths, block_table=table, num_splits=1,
        )  # fmt: skip
        if pages.device.type == "cuda":
            torch.cuda.synchronize(pages.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _attend_sequence(
    query_THD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: list[int],
    length: int,
    scale: float | None,
    window: Window,
    enable_gqa: bool,
) -> torch.Tensor:
    keys_HKD, values_HKD = (
        (one[pages[0]] if len(pages) == 1 else one[pages].flatten(0, 1))[:length].transpose(0, 1)
        for one in (key, value)
    )
    return functional.scaled_dot_product_attention(
        query_THD.transpose(0, 1).unsqueeze(0),
        keys_HKD.unsqueeze(0),
        values_HKD.unsqueeze(0),
        attn_mask=_visible(len(query_THD), length, window, query_THD.device),
        scale=scale,
        enable_gqa=enable_gqa,
    )[0].transpose(0, 1)


def _visible(new: int, length: int, window: Window, device: torch.device) -> torch.Tensor | None:
    """What the last `new` of `length` positions see, `[new, length]`; None if everything."""
    left, right = window
    if left < 0 and (right < 0 or (right == 0 and new == 1)):
        return None
    queries = torch.arange(length - new, length, device=device).unsqueeze(1)
    distance = queries - torch.arange(length, device=device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen
