"""A store that has everything in memory: the reference in tests, and the fast end of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from swarm.models.flash.records import FinishedRead, Indices, PendingRead, RecordBuffer, RecordLayout, StoreCounters


class MemoryStore:
    """All records in memory.

    Args:
        layout: of the records.
        tensors: every tensor that the layout names, whole.
    """

    def __init__(self, layout: RecordLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout
        self.counters = StoreCounters()
        self._records = RecordBuffer(layout, layout.count)
        for field in layout.fields:
            parts = field.parts(tensors[field.tensor].to(layout.dtype))
            self._records.field(field.tensor).copy_(parts.reshape(layout.count, *(field.shape or (1,))))

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        buffer.copy_from(self._records, records, slots)
        self.counters.records += len(records)
        self.counters.bytes += len(records) * self.layout.stride
        self.counters.reads += int(np.count_nonzero(np.diff(records) != 1)) + 1 if len(records) else 0
        return FinishedRead()

    def close(self) -> None:
        """There is nothing to let go of."""
