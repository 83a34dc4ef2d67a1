"""The interface between those who compute with records and whatever holds them.

A `WeightStore` holds the records of one block. What computes (`neurons`, `experts`, `streaming`) owns a `RecordBuffer`,
decides which records lie in it, and has the store read the others. It never learns where they come from.
`MemoryStore` is the store that has everything in memory: the reference in tests, and the fast end of the benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from swarm.models.flash.records.record_buffer import Indices, RecordBuffer
from swarm.models.flash.records.record_layout import RecordLayout


class PendingRead(Protocol):
    """Records on their way into a buffer."""

    def wait(self) -> None:
        """Wait until all have arrived. Raises `DriveFailed` if some cannot be read, or take too long."""


@dataclass
class StoreCounters:
    """What a store did since it was opened.

    Attributes:
        records: records read.
        bytes: bytes read, padding and gaps included.
        reads: operations of the drive; neighboring records need one.
        wait_seconds: time that computing stood still in `PendingRead.wait`.
    """

    records: int = 0
    bytes: int = 0
    reads: int = 0
    wait_seconds: float = 0.0


class WeightStore(Protocol):
    """Holds the records of one block, and reads them into memory on request.

    Used by one thread at a time.

    Attributes:
        layout: of the records.
        counters: what was read.
    """

    layout: RecordLayout
    counters: StoreCounters

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        """Begin to read `records[i]` into `slots[i]` of `buffer`.

        The slots must not be used before the returned read was waited for. Records that lie side by side in the file
        and go to neighboring slots are read as one. Raises `DriveFailed`.
        """

    def close(self) -> None:
        """Let go of files. Reads that are pending are waited for."""


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


class FinishedRead:
    """A read that is over."""

    def wait(self) -> None:
        """Return at once."""
