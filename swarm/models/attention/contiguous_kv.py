"""Keys and values of some rows, each row in its own place, from slot 0 on.

Rows may have any lengths; a row is written at its own end, in place. Room grows ahead of need, so an ordinary step
copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MIN_GROWTH_POSITIONS = 64
MAX_GROWTH_POSITIONS = 512
"""Slots."""


class ContiguousKV:
    """Keys and values of rows.

    Attributes:
        layers: number of a layer that has written to it -> keys, values `[rows, heads, capacity, dim]`.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._capacity = 0

    def reserve(self, length: int) -> None:
        """Rows will be up to `length` long soon: storage that grows anyway grows that far."""
        self._capacity = max(self._capacity, length)

    def layer_storage(
        self, number: int, end: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of one layer with room for slots below `end`, for keys and values like those given."""
        stored = self.layers.get(number)
        if stored is None or end > stored[0].shape[2]:
            before = stored or (_nothing_like(keys, self.rows), _nothing_like(values, self.rows))
            capacity = self._grown_capacity(before[0].shape[2], end)
            stored = self.layers[number] = _copied(before[0], capacity), _copied(before[1], capacity)
        return stored

    def select_sequences(self, rows: Sequence[int], length: int) -> ContiguousKV:
        """A new store out of copies of some rows, of which the first `length` slots are used."""
        result = ContiguousKV(len(rows))
        for number, stored in self.layers.items():
            capacity = result._grown_capacity(0, max(1, length))
            result.layers[number] = tuple(_selected(tensor, rows, length, capacity) for tensor in stored)  # type: ignore[assignment]
        return result

    def _grown_capacity(self, capacity: int, needed: int) -> int:
        return max(grown_capacity(capacity, needed), self._capacity)


def grown_capacity(capacity: int, needed: int) -> int:
    """Slots for storage of `capacity` slots that needs more: twice as many at first, then by steps.

    So room that is never used stays small beside what was reserved.
    """
    return max(capacity + min(max(MIN_GROWTH_POSITIONS, capacity), MAX_GROWTH_POSITIONS), needed)


def _nothing_like(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.new_empty(rows, tensor.shape[1], 0, tensor.shape[-1])


def _copied(storage: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros, not empty: slots behind a row's end are masked, but still multiplied by a weight of zero.
    rows, heads, used, dim = storage.shape
    larger = storage.new_zeros(rows, heads, capacity, dim)
    larger[:, :, :used] = storage
    return larger


def _selected(storage: torch.Tensor, rows: Sequence[int], length: int, capacity: int) -> torch.Tensor:
    result = storage.new_zeros(len(rows), storage.shape[1], capacity, storage.shape[3])
    index = torch.tensor(rows, device=storage.device)
    result[:, :, :length] = storage[:, :, :length].index_select(0, index)
    return result
