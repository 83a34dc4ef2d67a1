"""Attention over sequences that lie in pages of a pool: one call a layer for all sequences.

The kernel knows causal attention, with a sliding window or without. Everything else (chunks, soft-capped scores, sinks,
latents in the cache) raises `PackingUnsupported`, and such models use the contiguous layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
from swarm.models.attention.paged_kernels import PagedKernel, Window

CAUSAL_WINDOW: Window = (-1, 0)


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
            self._windows[id(mask)] = window_of(mask.function)
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
