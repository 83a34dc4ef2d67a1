"""The attention cache that a span's layers write to: a rectangle of sequences, all ending at the same slot.

transformers' own dynamic cache concatenates at every step, which copies the whole past of every layer. This one writes
in place and grows ahead of need. It keeps every position, also in layers with a sliding window (the mask hides what
lies outside of the window), so that a session can be rolled back to any position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm.models.attention.contiguous_attention import grown_capacity


class PaddedKVLayer(CacheLayerMixin):
    """Keys and values of one layer, `[sequences, heads, capacity, dim]`; the first `length` slots are used.

    Attributes:
        index_keys: what layers that choose the positions to attend to choose them by, `[sequences, 1, capacity, dim]`;
            None for others.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, length: int = 0, max_length: int | None = None) -> None:
        super().__init__()
        self.length = self._index_length = length
        self.max_length = max_length
        self.index_keys: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[sequences, heads, new, dim]` and return everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys = _appended(self.keys, self.length, key_states, self.max_length)
        self.values = _appended(self.values, self.length, value_states, self.max_length)
        end = self.length = self.length + key_states.shape[-2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys `[sequences, new, dim]` and return everything so far."""
        new = indexer_key_states.unsqueeze(1)
        if self.index_keys is None:
            self.index_keys = new.new_empty(len(new), 1, 0, new.shape[-1])
        self.index_keys = _appended(self.index_keys, self._index_length, new, self.max_length)
        self._index_length += new.shape[2]
        return self.index_keys[:, 0, : self._index_length]

    def truncate(self, length: int) -> None:
        """Drop what lies at `length` and behind."""
        self.length = self._index_length = length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _appended(storage: torch.Tensor, used: int, new: torch.Tensor, max_length: int | None) -> torch.Tensor:
    """The storage with new slots behind those that are used, in place unless it has to grow."""
    end = used + new.shape[2]
    if end > storage.shape[2]:
        storage = _grown(storage, used, grown_capacity(storage.shape[2], end, max_length))
    storage[:, :, used:end] = new
    return storage


def _grown(storage: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    # Zeros, not empty: slots under a left pad are never written but are multiplied by a weight of zero.
    larger = storage.new_zeros(*storage.shape[:2], capacity, storage.shape[-1])
    larger[:, :, :used] = storage[:, :, :used]
    return larger


@dataclass(frozen=True)
class PaddedSlice:
    """One sequence of a rectangle: `length` positions, the first at slot `pad` of row `index`."""

    cache: PaddedKV
    index: int
    pad: int
    length: int


class PaddedKV(Cache):
    """Keys and values of a rectangle of sequences, which all end at slot `length`; one `PaddedKVLayer` a layer.

    Args:
        end: number of layers of the model, or of those up to the last one used.
        first: the first layer used. transformers asks layer 0 for the length, so the places before `first` hold the
            first used layer too.
        length: slots that are used already.
        max_length: slots that no sequence will exceed, beyond which no layer grows ahead of need; None if unknown.
    """

    def __init__(self, end: int, first: int = 0, length: int = 0, max_length: int | None = None) -> None:
        self.length = length
        self.first = first
        self.max_length = max_length
        used = [PaddedKVLayer(length, max_length) for _ in range(first, end)]
        super().__init__(layers=[used[0]] * first + used)

    @property
    def sequences(self) -> int:
        """How many sequences it holds; 0 before the first step."""
        keys = self.layers[self.first].keys
        return 0 if keys is None else int(keys.shape[0])

    def truncate(self, length: int) -> None:
        """Drop what lies at `length` and behind, in every layer; also repairs a forward that failed half-way."""
        self.length = length
        for layer in self.layers:
            layer.truncate(length)  # type: ignore[union-attr]

    @classmethod
    def from_slices(cls, pieces: Sequence[PaddedSlice], max_length: int | None = None) -> PaddedKV:
        """A new rectangle of copies of sequences, aligned at their ends.

        Args:
            max_length: of the new rectangle, which then has no room ahead of need; None for that of the old one.
        """
        length = max(piece.length for piece in pieces)
        like = pieces[0].cache
        result = cls(len(like.layers), like.first, length, like.max_length if max_length is None else max_length)
        for number in range(like.first, len(like.layers)):
            layer = result.layers[number]
            sources: list[Any] = [piece.cache.layers[number] for piece in pieces]
            if not sources[0].is_initialized:
                continue
            room = sources[0].keys.shape[2] if max_length is None else length
            capacity = max(grown_capacity(0, room, result.max_length), length)
            layer.keys = _assembled([source.keys for source in sources], pieces, length, capacity)
            layer.values = _assembled([source.values for source in sources], pieces, length, capacity)
            layer.is_initialized = True
            if sources[0].index_keys is not None:
                keys = [source.index_keys for source in sources]
                layer.index_keys = _assembled(keys, pieces, length, capacity)  # type: ignore[union-attr]
        return result


def _assembled(sources: list[torch.Tensor], pieces: Sequence[PaddedSlice], length: int, capacity: int) -> torch.Tensor:
    first = sources[0]
    result = first.new_zeros(len(pieces), first.shape[1], capacity, first.shape[3])
    same = all(
        source is first and piece.pad == pieces[0].pad and piece.length == length
        for source, piece in zip(sources, pieces, strict=True)
    )
    if same:  # a reordering of one rectangle, as in beam search: one copy for all sequences
        pad = pieces[0].pad
        index = torch.tensor([piece.index for piece in pieces], device=first.device)
        result[:, :, :length] = first[:, :, pad : pad + length].index_select(0, index)
        return result
    for row, (source, piece) in enumerate(zip(sources, pieces, strict=True)):
        result[row, :, length - piece.length : length] = source[piece.index, :, piece.pad : piece.pad + piece.length]
    return result
