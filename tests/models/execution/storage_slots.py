"""Counts the slots for keys and values that exist; a slot is a position of a sequence."""

from __future__ import annotations

import weakref
from types import ModuleType

import pytest
import torch

from swarm.models.attention import contiguous_attention, padded_kv

CONTIGUOUS: tuple[tuple[ModuleType, str], ...] = (
    (contiguous_attention, "_grown"),
    (contiguous_attention, "_selected"),
)
PADDED: tuple[tuple[ModuleType, str], ...] = ((padded_kv, "_grown"), (padded_kv, "_assembled"))
"""The functions that make the storage of each layout."""


class Slots:
    """Slots that exist in one block, now and at most since `begin`.

    Args:
        layers: of the span whose storage is counted.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.now, self.peak = layers, 0, 0

    def count(self, storage: torch.Tensor) -> torch.Tensor:
        slots = storage.shape[0] * storage.shape[2]
        self.now += slots
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, slots)
        return storage

    def _forget(self, slots: int) -> None:
        self.now -= slots

    def begin(self) -> None:
        self.peak = self.now

    @property
    def most(self) -> int:
        return self.peak // (2 * self.layers)


def count_storage(layers: int, makers: tuple[tuple[ModuleType, str], ...], monkeypatch: pytest.MonkeyPatch) -> Slots:
    """Count all storage that these functions make from now on."""
    slots = Slots(layers)
    for module, name in makers:
        make = getattr(module, name)

        def counted(*args, make=make):
            return slots.count(make(*args))

        monkeypatch.setattr(module, name, counted)
    return slots
