"""Sequences that lie in one piece each, in a store for each session, and attention over them.

Sequences may have any lengths; each one begins at slot 0 and is written at its own end, in place. The storage grows
ahead of need, so an ordinary step copies nothing, but never beyond the length that room was reserved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from swarm.models.attention.multi_session_attention import (
    AttentionExtras,
    AttentionSite,
    ExpandKV,
    PackedBatch,
    PackedMask,
)
from swarm.models.attention.sequence_states import StagedStates, StateBatch

MIN_GROWTH_POSITIONS = 64
MAX_GROWTH_POSITIONS = 512

MAX_SCORES = 1 << 24
"""Scores that exist at once where attention is written out: those of a long prompt over a long past would take more
memory than all else."""


class ContiguousKV:
    """Keys and values of sequences, in one storage for each layer.

    Args:
        max_length: slots that no sequence will exceed; None if that is not known.

    Attributes:
        layers: number of a layer that has written to it -> keys, values `[sequences, heads, capacity, dim]`.
        states: what layers with a state keep of the sequences.
    """

    def __init__(self, sequences: int, max_length: int | None = None) -> None:
        self.sequences = sequences
        self.max_length = max_length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.states = StagedStates(sequences)
        self._capacity = 0

    def reserve(self, length: int) -> None:
        """Sequences will soon be up to `length` long: storage that has to grow grows that far."""
        self._capacity = max(self._capacity, length)

    def layer_storage(
        self, number: int, end: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of one layer with space for slots below `end`, for keys and values like those given."""
        stored = self.layers.get(number)
        if stored is None or end > stored[0].shape[2]:
            before = stored or (_empty_like(keys, self.sequences), _empty_like(values, self.sequences))
            capacity = self._grown_capacity(before[0].shape[2], end)
            stored = self.layers[number] = _grown(before[0], capacity), _grown(before[1], capacity)
        return stored

    def select_sequences(self, sequences: Sequence[int], length: int, max_length: int | None = None) -> ContiguousKV:
        """A new store with copies of some sequences, of which the first `length` slots are used.

        Args:
            max_length: of the new store; None for this one's.
        """
        result = ContiguousKV(len(sequences), self.max_length if max_length is None else max_length)
        for number, (keys, values) in self.layers.items():
            capacity = result._grown_capacity(0, max(1, length))
            result.layers[number] = (
                _selected(keys, sequences, length, capacity),
                _selected(values, sequences, length, capacity),
            )
        return result

    def _grown_capacity(self, capacity: int, needed: int) -> int:
        return max(grown_capacity(capacity, needed, self.max_length), self._capacity)


def grown_capacity(capacity: int, needed: int, max_length: int | None = None) -> int:
    """Slots for storage of `capacity` slots that needs more: twice as many at first, then a fixed number more.

    So slots that are never used stay few beside those that are. There are none beyond `max_length` that are not needed.
    """
    grown = capacity + min(max(MIN_GROWTH_POSITIONS, capacity), MAX_GROWTH_POSITIONS)
    return max(grown if max_length is None else min(grown, max_length), needed)


def _empty_like(tensor: torch.Tensor, sequences: int) -> torch.Tensor:
    return tensor.new_empty(sequences, tensor.shape[1], 0, tensor.shape[-1])


def _grown(storage: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not empty: slots behind a sequence's end are masked, but still multiplied by a weight of zero.
    sequences, heads, used, dim = storage.shape
    larger = storage.new_zeros(sequences, heads, capacity, dim)
    larger[:, :, :used] = storage
    return larger


def _selected(storage: torch.Tensor, sequences: Sequence[int], length: int, capacity: int) -> torch.Tensor:
    result = storage.new_zeros(len(sequences), storage.shape[1], capacity, storage.shape[3])
    index = torch.tensor(sequences, device=storage.device)
    result[:, :, :length] = storage[:, :, :length].index_select(0, index)
    return result


@dataclass(frozen=True, slots=True)
class ContiguousSegment:
    """Neighboring sequences of a store that bring equally many tokens to a batch.

    If they bring more than one token each, they all begin at the same slot.

    Attributes:
        first: number of the first sequence in the store.
        starts: the slot of each sequence's first new token.
        new: tokens of each sequence.
        token: number of the first sequence's first token in the batch.
        sequences: how many there are.
        end: slots that the longest of them will have.
        even: whether all begin at the same slot.
        tokens: where their tokens lie in the batch.
    """

    store: ContiguousKV
    first: int
    starts: tuple[int, ...]
    new: int
    token: int
    sequences: int = field(init=False)
    end: int = field(init=False)
    even: bool = field(init=False)
    tokens: slice = field(init=False)

    def __post_init__(self) -> None:
        # Each layer asks for them.
        object.__setattr__(self, "sequences", len(self.starts))
        object.__setattr__(self, "end", max(self.starts) + self.new)
        object.__setattr__(self, "even", self.starts.count(self.starts[0]) == len(self.starts))
        object.__setattr__(self, "tokens", slice(self.token, self.token + self.sequences * self.new))


class ContiguousBatch(PackedBatch):
    """A batch of tokens whose sequences lie in contiguous stores.

    Args:
        segments: the tokens of the batch, in order.
    """

    def __init__(self, segments: Sequence[ContiguousSegment]) -> None:
        states = StateBatch([(one.store.states, one.first, one.sequences) for one in segments])
        super().__init__(max(segment.end for segment in segments), states)
        self._segments = segments
        one = segments[0]
        simple = len(segments) == 1 and one.new == 1 and one.even and one.sequences == one.store.sequences
        self._all = one if simple else None
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def attend_at(
        self,
        site: AttentionSite,
        query_NH1D: torch.Tensor,
        keys_NK1D: torch.Tensor,
        values_NK1D: torch.Tensor,
        sinks: torch.Tensor | None,
        width: int,
    ) -> torch.Tensor:
        """As for any batch, with a third of the calls for what is most frequent: a token of each sequence of a session,
        all at the same position."""
        segment = self._all
        if segment is None or site.softcap is not None or sinks is not None or hasattr(site.module, "expand_kv"):
            return super().attend_at(site, query_NH1D, keys_NK1D, values_NK1D, sinks, width)
        end = segment.end
        keys, values = segment.store.layer_storage(site.layer, end, keys_NK1D, values_NK1D)
        keys[:, :, end - 1 : end], values[:, :, end - 1 : end] = keys_NK1D, values_NK1D
        keys, values = keys[:, :, :end], values[:, :, :end]
        self._stored_keys, self._written = keys_NK1D, [(keys, values)]
        seen = self._mask(0, segment, site.mask)
        seen = seen.unsqueeze(1) if seen is not None else None
        query = query_NH1D.reshape(segment.sequences, keys.shape[1], -1, query_NH1D.shape[-1])
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=site.scale)
        return out.reshape(segment.sequences, 1, -1, width)

    def write_kv(self, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor) -> None:
        self._written = [_write(segment, layer, keys_NH1D, values_NH1D) for segment in self._segments]

    def compute_attention(
        self,
        query_NH1D: torch.Tensor,
        expand: ExpandKV | None,
        width: int,
        mask: PackedMask,
        scale: float | None,
        extra: AttentionExtras,
    ) -> torch.Tensor:
        written = self._written if expand is None else [expand(*pair) for pair in self._written]
        results = [
            _attend(segment, query_NH1D[segment.tokens], *pair, self._mask(number, segment, mask), scale, extra)
            for number, (segment, pair) in enumerate(zip(self._segments, written, strict=True))
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _mask(self, number: int, segment: ContiguousSegment, mask: PackedMask) -> torch.Tensor | None:
        """What each sequence may see, `[sequences or 1, new, slots]`; None if it is everything, or just causal."""
        key = number, id(mask)
        if key not in self._masks:
            self._masks[key] = _visible(segment, mask, self._written[number][0].device)
        return self._masks[key]


def _write(
    segment: ContiguousSegment, layer: int, keys_NH1D: torch.Tensor, values_NH1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append a segment's new keys and values; all that its sequences have now, `[sequences, heads, slots, dim]`."""
    end, chosen = segment.end, slice(segment.first, segment.first + segment.sequences)
    written = []
    for stored, new in zip(
        segment.store.layer_storage(layer, end, keys_NH1D, values_NH1D), (keys_NH1D, values_NH1D), strict=True
    ):
        part = new[segment.tokens]
        if segment.even:
            start = segment.starts[0]
            if segment.new > 1:
                part = part.reshape(segment.sequences, segment.new, part.shape[1], -1).transpose(1, 2)
            stored[chosen, :, start:end] = part
        else:
            device = stored.device
            index = torch.arange(chosen.start, chosen.stop, device=device), slice(None), _tensor(segment.starts, device)
            stored[index] = part.squeeze(2)
        written.append(stored[chosen, :, :end])
    return written[0], written[1]


def _visible(segment: ContiguousSegment, mask: PackedMask, device: torch.device) -> torch.Tensor | None:
    if mask.causal and segment.even and (segment.new == 1 or segment.starts[0] == 0):
        return None
    slots_S = torch.arange(segment.end, device=device)
    if segment.even:
        start = segment.starts[0]
        queries = torch.arange(start, start + segment.new, device=device).view(1, -1, 1)
    else:
        queries = _tensor(segment.starts, device).view(-1, 1, 1)
    # A rule may look at distances only, so what lies behind a sequence's own end is excluded here.
    seen = mask.function(0, 0, queries, slots_S) & (slots_S <= queries)
    if segment.new == 1 and bool(seen.all()):
        return None
    return seen


def _attend(
    segment: ContiguousSegment,
    query_NH1D: torch.Tensor,
    keys_RKSD: torch.Tensor,
    values_RKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    extra: AttentionExtras,
) -> torch.Tensor:
    """Attention of one segment, `[sequences * new, 1, heads, dim]`.

    Heads that share keys are handled like further tokens: nothing is repeated in memory.
    """
    sequences, new = segment.sequences, segment.new
    heads, shared = query_NH1D.shape[1], keys_RKSD.shape[1]
    group = heads // shared
    if not extra.plain:
        out = _attend_unfused(segment, query_NH1D, keys_RKSD, values_RKSD, mask, scale, extra)
    elif new == 1:
        query = query_NH1D.reshape(sequences, shared, group, -1)
        seen = mask.unsqueeze(1) if mask is not None else None
        out = functional.scaled_dot_product_attention(query, keys_RKSD, values_RKSD, attn_mask=seen, scale=scale)
    else:
        query = query_NH1D.reshape(sequences, new, heads, -1).transpose(1, 2)
        seen = mask.unsqueeze(1) if mask is not None else None
        out = functional.scaled_dot_product_attention(
            query, keys_RKSD, values_RKSD, attn_mask=seen, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        ).transpose(1, 2)
    return out.reshape(sequences * new, 1, heads, values_RKSD.shape[-1])


def _attend_unfused(
    segment: ContiguousSegment,
    query_NH1D: torch.Tensor,
    keys_RKSD: torch.Tensor,
    values_RKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    extra: AttentionExtras,
) -> torch.Tensor:
    """Attention written out, for what the fused kernels do not support; `[sequences, new, heads, dim]`."""
    sequences, new, (_, shared, slots, dim) = segment.sequences, segment.new, keys_RKSD.shape
    query_RKGTD = query_NH1D.reshape(sequences, new, shared, -1, dim).permute(0, 2, 3, 1, 4)
    if mask is None and new > 1:
        mask = torch.ones(1, new, slots, dtype=torch.bool, device=query_NH1D.device).tril()
    size = max(1, MAX_SCORES // (sequences * query_NH1D.shape[1] * slots))
    pieces = []
    for first in range(0, new, size):
        seen = mask[:, first : first + size] if mask is not None else None
        query_RKGtD = query_RKGTD[:, :, :, first : first + size]
        pieces.append(_weigh_values(query_RKGtD, keys_RKSD, values_RKSD, seen, scale, extra))
    output_RKGTD = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)
    return output_RKGTD.permute(0, 3, 1, 2, 4)


def _weigh_values(
    query_RKGTD: torch.Tensor,
    keys_RKSD: torch.Tensor,
    values_RKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    extra: AttentionExtras,
) -> torch.Tensor:
    """Attention of some new tokens, `[sequences, shared, group, new, dim]`."""
    sequences, shared, _, new, dim = query_RKGTD.shape
    slots = keys_RKSD.shape[2]
    scores_RKGTS = query_RKGTD @ keys_RKSD.unsqueeze(2).transpose(3, 4) * (scale if scale is not None else dim**-0.5)
    if extra.softcap is not None:
        scores_RKGTS = torch.tanh(scores_RKGTS / extra.softcap) * extra.softcap
    if mask is not None:
        scores_RKGTS = scores_RKGTS.masked_fill(~mask[:, None, None], torch.finfo(scores_RKGTS.dtype).min)
    if extra.sinks is not None:
        sinks = extra.sinks.view(1, shared, -1, 1, 1).expand(sequences, -1, -1, new, 1).to(scores_RKGTS.dtype)
        scores_RKGTS = torch.cat([scores_RKGTS, sinks], dim=-1)
    weights = torch.softmax(scores_RKGTS.float(), dim=-1)[..., :slots].to(values_RKSD.dtype)
    return weights @ values_RKSD.unsqueeze(2)


def _tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)
