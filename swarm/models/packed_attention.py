"""Attention over packed tokens: one forward of the family's layers for tokens of many rows of many sessions.

The layers see a batch of single tokens `[tokens, 1, hidden]`, as in any decode step, so everything but attention is the
family's own code on one big product. transformers lets attention and masks be exchanged (`AttentionInterface`,
`AttentionMaskInterface`); ours finds each token's row, writes its keys and values there, and lets it see what the
family's own mask function allows.

The layers hand on neither batch nor cache to the attention function, so the batch in progress is kept by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from swarm.models.row_store import RowStore

NAME = "swarm_packed"
"""The attention implementation, as the models' configs name it."""

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


class NotPackable(Exception):
    """The family's layers do something between cache and attention that packed tokens cannot follow."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `first` to `first + rows` of a store, `new` tokens each; the first of all is token `token` of the batch.

    Rows that bring more than one token all begin at the same slot.
    """

    store: RowStore
    first: int
    starts: tuple[int, ...]
    new: int
    token: int

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def end(self) -> int:
        """Slots that the longest of the rows will have."""
        return max(self.starts) + self.new

    @property
    def even(self) -> bool:
        """Whether all rows begin at the same slot."""
        return self.starts.count(self.starts[0]) == len(self.starts)

    @property
    def tokens(self) -> slice:
        return slice(self.token, self.token + self.rows * self.new)


class PackedBatch(Cache):
    """What the layers get in the place of a cache: it writes new keys and values where they belong.

    Args:
        segments: the tokens of the batch, in order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(layers=[])
        self._segments = segments
        self._longest = max((segment.end for segment in segments), default=1)
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handed_on: torch.Tensor | None = None
        self._open = 0
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._longest - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._longest, 0

    @property
    def is_compileable(self) -> bool:
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[tokens, heads, 1, dim]`, and return just that: attention takes the whole past from the stores."""
        self._open += 1
        self._written = [_write(segment, layer_idx, key_states, value_states) for segment in self._segments]
        self._handed_on = key_states
        return key_states, value_states

    def attend(
        self,
        module: Any,
        query_NH1D: torch.Tensor,
        keys: torch.Tensor | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: Extra,
    ) -> torch.Tensor:
        """Attention of all tokens, `[tokens, 1, heads, width]`.

        Args:
            module: the family's attention.
            keys: as the layer hands them to attention, which must be as they were written.

        Raises `NotPackable`.
        """
        self._open -= 1
        written = self._written
        if hasattr(module, "expand_kv"):  # the cache holds what keys and values are computed from (DeepSeek's latents)
            written = [module.expand_kv(*pair) for pair in written]
        elif keys is not self._handed_on:
            raise NotPackable("the layers change keys on their way to attention, or share them between layers")
        results = [
            _attend(segment, query_NH1D[segment.tokens], *pair, self._mask(number, segment, mask), scale, extra)
            for number, (segment, pair) in enumerate(zip(self._segments, written, strict=True))
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def check(self) -> None:
        """Raise `NotPackable` if a layer computed its attention without us."""
        if self._open or self._handed_on is None:
            raise NotPackable("the layers do not compute their attention where transformers lets it be exchanged")

    def _mask(self, number: int, segment: Segment, mask: PackedMask) -> torch.Tensor | None:
        """What each row of a segment may see, `[rows or 1, new, slots]`; None if it is everything, or just causal."""
        key = number, id(mask)
        if key not in self._masks:
            self._masks[key] = _visible(segment, mask, self._written[number][0].device)
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The family's own rule for which slot a token may see, in the place of a tensor."""

    function: MaskFunction

    @property
    def causal(self) -> bool:
        """Whether it is the ordinary rule: everything up to the token itself."""
        return self.function is causal_mask_function


@dataclass(frozen=True, slots=True)
class Extra:
    """What some families add to attention: soft-capped scores, a learned sink for each head."""

    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


_running = threading.local()


def current_batch() -> PackedBatch:
    """What this thread is running. Raises `NotPackable` if it is nothing."""
    batch: PackedBatch | None = getattr(_running, "batch", None)
    if batch is None:
        raise NotPackable("the layers call attention outside of a forward over packed tokens")
    return batch


class running:
    """`with running(batch):` the layers that this thread runs belong to `batch`."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        _running.batch = self._batch

    def __exit__(self, *error: object) -> None:
        _running.batch = None


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls, on `[tokens, heads, 1, dim]`."""
    if not isinstance(attention_mask, PackedMask) or query.shape[2] != 1:
        raise NotPackable("the layers call attention in a way of their own")
    extra = Extra(kwargs.get("softcap"), kwargs.get("s_aux"))
    return current_batch().attend(module, query, key, value.shape[-1], attention_mask, scaling, extra), None


def _mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> PackedMask:
    """The mask function that transformers calls, once for each kind of layer."""
    return PackedMask(mask_function)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, cast(Any, _mask))


def _write(
    segment: Segment, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append a segment's new keys and values; everything that its rows have now, `[rows, heads, slots, dim]`."""
    end, rows = segment.end, slice(segment.first, segment.first + segment.rows)
    written = []
    for stored, new in zip(
        segment.store.layer(layer, end, keys_NH1D, values_NH1D), (keys_NH1D, values_NH1D), strict=True
    ):
        part = new[segment.tokens]
        if segment.even:
            start = segment.starts[0]
            if segment.new > 1:
                part = part.reshape(segment.rows, segment.new, part.shape[1], -1).transpose(1, 2)
            stored[rows, :, start:end] = part
        else:
            device = stored.device
            index = torch.arange(rows.start, rows.stop, device=device), slice(None), _tensor(segment.starts, device)
            stored[index] = part.squeeze(2)
        written.append(stored[rows, :, :end])
    return written[0], written[1]


def _visible(segment: Segment, mask: PackedMask, device: torch.device) -> torch.Tensor | None:
    if mask.causal and segment.even and (segment.new == 1 or segment.starts[0] == 0):
        return None
    slots_S = torch.arange(segment.end, device=device)
    if segment.even:
        start = segment.starts[0]
        queries = torch.arange(start, start + segment.new, device=device).view(1, -1, 1)
    else:
        queries = _tensor(segment.starts, device).view(-1, 1, 1)
    # A rule may look no further than at distances, so that a row is told its own end.
    seen = mask.function(0, 0, queries, slots_S) & (slots_S <= queries)
    if segment.new == 1 and bool(seen.all()):
        return None
    return seen


def _attend(
    segment: Segment,
    query_NH1D: torch.Tensor,
    keys_RKSD: torch.Tensor,
    values_RKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    extra: Extra,
) -> torch.Tensor:
    """Attention of one segment, `[rows * new, 1, heads, dim]`.

    Heads that share keys are handled as if they were further tokens: nothing is repeated in memory.
    """
    rows, new = segment.rows, segment.new
    heads, shared = query_NH1D.shape[1], keys_RKSD.shape[1]
    group = heads // shared
    if not extra.plain:
        out = _general(segment, query_NH1D, keys_RKSD, values_RKSD, mask, scale, extra)
    elif new == 1:
        query = query_NH1D.reshape(rows, shared, group, -1)
        seen = mask.unsqueeze(1) if mask is not None else None
        out = functional.scaled_dot_product_attention(query, keys_RKSD, values_RKSD, attn_mask=seen, scale=scale)
    else:
        query = query_NH1D.reshape(rows, new, heads, -1).transpose(1, 2)
        seen = mask.unsqueeze(1) if mask is not None else None
        out = functional.scaled_dot_product_attention(
            query, keys_RKSD, values_RKSD, attn_mask=seen, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        ).transpose(1, 2)
    return out.reshape(rows * new, 1, heads, values_RKSD.shape[-1])


def _general(
    segment: Segment,
    query_NH1D: torch.Tensor,
    keys_RKSD: torch.Tensor,
    values_RKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    extra: Extra,
) -> torch.Tensor:
    """Attention written out, for what the fused kernels do not know; `[rows, new, heads, dim]`."""
    rows, new, (_, shared, slots, dim) = segment.rows, segment.new, keys_RKSD.shape
    query_RKGTD = query_NH1D.reshape(rows, new, shared, -1, dim).permute(0, 2, 3, 1, 4)
    scores_RKGTS = query_RKGTD @ keys_RKSD.unsqueeze(2).transpose(3, 4) * (scale if scale is not None else dim**-0.5)
    if extra.softcap is not None:
        scores_RKGTS = torch.tanh(scores_RKGTS / extra.softcap) * extra.softcap
    if mask is None and new > 1:
        mask = torch.ones(1, new, slots, dtype=torch.bool, device=query_NH1D.device).tril()
    if mask is not None:
        scores_RKGTS = scores_RKGTS.masked_fill(~mask[:, None, None], torch.finfo(scores_RKGTS.dtype).min)
    if extra.sinks is not None:
        sinks = extra.sinks.view(1, shared, -1, 1, 1).expand(rows, -1, -1, new, 1).to(scores_RKGTS.dtype)
        scores_RKGTS = torch.cat([scores_RKGTS, sinks], dim=-1)
    weights = torch.softmax(scores_RKGTS.float(), dim=-1)[..., :slots].to(values_RKSD.dtype)
    return (weights @ values_RKSD.unsqueeze(2)).permute(0, 3, 1, 2, 4)


def _tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)
