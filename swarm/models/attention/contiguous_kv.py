"""Keys and values of some sequences, each one in a row of its own, from slot 0 on.

Sequences may have any lengths; each one is written at its own end, in place. The storage grows ahead of need, so an
ordinary step copies nothing, but never beyond the length that room was reserved for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MIN_GROWTH_POSITIONS = 64
MAX_GROWTH_POSITIONS = 512


class ContiguousKV:
    """Keys and values of sequences, in one storage for each layer.

    Args:
        max_length: slots that no sequence will exceed; None if that is not known.

    Attributes:
        layers: number of a layer that has written to it -> keys, values `[sequences, heads, capacity, dim]`.
    """

    def __init__(self, sequences: int, max_length: int | None = None) -> None:
        self.sequences = sequences
        self.max_length = max_length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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

    def select_sequences(self, sequences: Sequence[int], length: int) -> ContiguousKV:
        """A new store with copies of some sequences, of which the first `length` slots are used."""
        result = ContiguousKV(len(sequences), self.max_length)
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
