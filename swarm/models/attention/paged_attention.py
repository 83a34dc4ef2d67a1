"""Attention over sequences that lie in pages of a pool: one call a layer for all sequences.

The kernel is `torch.nn.attention.varlen.varlen_attn` with a block table (Kwon et al. 2023, "Efficient memory management
for large language model serving with PagedAttention"), which torch has from 2.13 on. The reference is the same function
written out: a CPU, which has no such kernel, computes with it, and a kernel is only used if it agrees with it.

A kernel knows causal attention, with a sliding window or without. Everything else (chunks, soft-capped scores, sinks,
latents in the cache) raises `PackingUnsupported`, and such models use the contiguous layout.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function, sliding_window_overlay

from swarm.models.attention.multi_session_attention import (
    AttentionExtras,
    ExpandKV,
    MaskFunction,
    PackedBatch,
    PackedMask,
    PackingUnsupported,
)
from swarm.models.attention.page_pool import PagePool

Window = tuple[int, int]
"""Positions that a token sees to its left and to its right, besides itself; -1 for any number."""

MAX_RELATIVE_ERROR = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Error of a kernel's outputs relative to their norm."""

CAUSAL_WINDOW: Window = (-1, 0)
NO_WINDOW: Window = (-1, -1)


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


def paged_kernel(device: torch.device) -> PagedKernel | None:
    """What computes attention over pages on a device; None on a GPU whose torch reads no pages (before 2.13)."""
    if device.type != "cuda":
        return reference_kernel
    try:
        from torch.nn.attention.varlen import varlen_attn  # late: it takes a second, and needs a GPU
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None

    def with_bounds_of_keys(*args: Any, **kwargs: Any) -> Any:
        """FlashAttention 2, torch's own, requires `cu_seq_k` beside pages, but uses `seqused_k`."""
        query, key, value, cu_seq_q, _, *rest = args
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_q, *rest, **kwargs)

    return with_bounds_of_keys


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
        for window in (NO_WINDOW if max(news) == 1 else CAUSAL_WINDOW, (page // 2, 0), (3, 0)):
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
        attn_mask=_visible_positions(len(query_THD), length, window, query_THD.device),
        scale=scale,
        enable_gqa=enable_gqa,
    )[0].transpose(0, 1)


def _visible_positions(new: int, length: int, window: Window, device: torch.device) -> torch.Tensor | None:
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


@dataclass(frozen=True)
class PagedAttention:
    """Where a span's sequences lie, and what computes attention over them. Shared by all parts of a loaded span."""

    pool: PagePool
    kernel: PagedKernel


@dataclass(frozen=True, slots=True)
class BatchSequence:
    """A sequence of a batch: `new` tokens from position `start` on; `table` has pages up to the last of them."""

    table: Sequence[int]
    start: int
    new: int

    @property
    def end(self) -> int:
        return self.start + self.new


@dataclass(frozen=True)
class PagedBatchIndex:
    """Where the tokens and sequences of a batch lie, as the kernel needs to know.

    Attributes:
        slots_N: int64, where each token's keys and values go: page x page size + position in the page.
        bounds: int32 `[sequences + 1]`, where each sequence's tokens begin.
        lengths: int32 `[sequences]`, positions that each sequence has with its new tokens.
        table: int32 `[sequences, width]`, the pages of each sequence.
        most_new, longest: the largest number of tokens and of positions of a sequence.
    """

    slots_N: torch.Tensor
    bounds: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    most_new: int
    longest: int


def build_index(members: Sequence[BatchSequence], page_size: int, device: torch.device) -> PagedBatchIndex:
    """The index of a batch of sequences that all bring tokens, one sequence after the other."""
    width = max(len(member.table) for member in members)
    table = [[*member.table, *[0] * (width - len(member.table))] for member in members]
    bounds = list(itertools.accumulate((member.new for member in members), initial=0))

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PagedBatchIndex(
        torch.tensor([slot for member in members for slot in new_slots(member, page_size)], device=device),
        integers(bounds),
        integers([member.end for member in members]),
        integers(table),
        max(member.new for member in members),
        max(member.end for member in members),
    )


def new_slots(member: BatchSequence, page_size: int) -> list[int]:
    """Where a sequence's new tokens go."""
    positions = range(member.start, member.end)
    return [member.table[position // page_size] * page_size + position % page_size for position in positions]


class PagedBatch(PackedBatch):
    """A batch of tokens whose sequences lie in pages.

    Args:
        index: the tokens of the batch.
    """

    def __init__(self, paging: PagedAttention, index: PagedBatchIndex) -> None:
        super().__init__(index.longest)
        self._paging = paging
        self._index = index
        self._layer: tuple[torch.Tensor, torch.Tensor] | None = None
        self._windows: dict[int, Window] = {}

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        self._layer = self._paging.pool.layer_storage(layer, keys_NH1D, values_NH1D)
        for stored, new in zip(self._layer, (keys_NH1D, values_NH1D), strict=True):
            stored.flatten(0, 1).index_copy_(0, self._index.slots_N, new.squeeze(2))

    def compute_attention(
        self,
        query_NH1D: torch.Tensor,
        expand: ExpandKV | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        assert self._layer is not None
        keys, values = self._layer
        if expand is not None or not extra.plain:
            raise PackingUnsupported(
                "attention over pages supports neither latents in the cache, nor soft caps, nor sinks"
            )
        index = self._index
        output: torch.Tensor = self._paging.kernel(
            query_NH1D.squeeze(2),
            keys,
            values,
            index.bounds,
            None,
            index.most_new,
            index.longest,
            scale=scale,
            window_size=self._window(mask),
            enable_gqa=query_NH1D.shape[1] != keys.shape[2],
            seqused_k=index.lengths,
            block_table=index.table,
            num_splits=1,
        )
        return output.unsqueeze(1)

    def _window(self, mask: PackedMask) -> Window:
        if id(mask) not in self._windows:
            window = window_of(mask.function)
            # The last token of a sequence sees all of it. Only without a window does FlashAttention 2 read keys that
            # several heads share once.
            last_only = window == CAUSAL_WINDOW and self._index.most_new == 1
            self._windows[id(mask)] = NO_WINDOW if last_only else window
        return self._windows[id(mask)]


def window_of(function: MaskFunction) -> Window:
    """The window that a family's mask function describes. Raises `PackingUnsupported` for any other rule.

    transformers makes a new function for each forward, so it is recognized by its parts.
    """
    if function is causal_mask_function:
        return CAUSAL_WINDOW
    parts = _closure(function, like=sliding_window_causal_mask_function(1)).get("mask_functions", ())
    if len(parts) == 2 and parts[1] is causal_mask_function:
        size = _closure(parts[0], like=sliding_window_overlay(1)).get("sliding_window")
        if isinstance(size, int) and size > 0 and _is_window(size):
            return size - 1, 0
    raise PackingUnsupported("attention over pages supports causal masks and sliding windows, and this is another rule")


def _closure(function: Any, like: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name, if it has the same code as `like`."""
    code = getattr(function, "__code__", None)
    if code is None or code is not like.__code__:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


@cache
def _is_window(size: int) -> bool:
    """Whether transformers' window of that size is a token and `size - 1` before it, for tokens around its border."""
    function = sliding_window_causal_mask_function(size)
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 3 * size]).unsqueeze(1)
    distances = torch.tensor([-1, 0, 1, size - 2, size - 1, size, size + 1])
    seen: torch.Tensor = function(0, 0, queries, queries - distances)  # type: ignore[arg-type, assignment]
    return torch.equal(seen, (distances >= 0).expand_as(seen) & (distances < size))
