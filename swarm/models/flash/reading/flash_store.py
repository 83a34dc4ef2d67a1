"""The `WeightStore` of a packed file on a drive."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from swarm.errors import PackedFileError
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.reads import coalesce
from swarm.models.flash.reading.record_reader import FlashIo, RecordReader
from swarm.models.flash.records.record_buffer import Indices, RecordBuffer
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT, RecordLayout
from swarm.models.flash.records.weight_store import FinishedRead, PendingRead, StoreCounters


class FlashStore:
    """The records of one block in a packed file, which was verified before.

    A read that fails leaves anything in its slots. If the drive stalls, late records may still be written there: until
    a later `read` into the same buffer was accepted, which the store refuses as long as that can happen, nothing else
    may be put into these slots.

    Args:
        reader: of the file; closed with the store.
        layout: of the records.
        offset: where record 0 lies in the file, a multiple of `RECORD_ALIGNMENT`.

    Raises `PackedFileError` if the file is too short for the layout.
    """

    def __init__(self, reader: RecordReader, layout: RecordLayout, offset: int = 0) -> None:
        if offset < 0 or offset % RECORD_ALIGNMENT:
            raise ValueError(f"records begin at a multiple of {RECORD_ALIGNMENT} bytes, not at {offset}")
        if reader.file_bytes < offset + layout.file_bytes:
            reader.close()
            raise PackedFileError(
                f"{reader.path} has {reader.file_bytes} bytes; its {layout.count} records need "
                f"{offset + layout.file_bytes}. Run `swarm flash prepare` again"
            )
        self.layout = layout
        self.counters = StoreCounters()
        self._reader = reader
        self._offset = offset

    @classmethod
    def open(cls, path: Path, layout: RecordLayout, io: FlashIo, offset: int = 0) -> FlashStore:
        """Open a packed file. Raises `PackedFileError`, and `InvalidOption` for direct reads where there are none."""
        return cls(open_reader(path, io), layout, offset)

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        _check_indices("records", records, self.layout.count)
        _check_indices("slots", slots, buffer.slots)
        if len(records) != len(slots) or buffer.layout.stride != self.layout.stride:
            raise ValueError(f"{len(records)} records of {self.layout.stride} bytes do not go to {len(slots)} slots")
        if not len(records):
            return FinishedRead()
        reads = coalesce(records, slots, self.layout.stride, self._offset)
        pending = self._reader.begin(reads, buffer.data)
        self.counters.records += len(records)
        self.counters.bytes += reads.nbytes
        self.counters.reads += len(reads)
        return TimedRead(pending, self.counters)

    def close(self) -> None:
        self._reader.close()


class TimedRead:
    """A pending read that counts how long computing stands still for it."""

    def __init__(self, pending: PendingRead, counters: StoreCounters) -> None:
        self._pending, self._counters = pending, counters

    def wait(self) -> None:
        began = time.perf_counter()
        try:
            self._pending.wait()
        finally:
            self._counters.wait_seconds += time.perf_counter() - began


def _check_indices(what: str, indices: Indices, count: int) -> None:
    """Raise `ValueError` for indices outside a file or a buffer: the kernel would read and write there."""
    if indices.dtype != np.int64 or indices.ndim != 1:
        raise ValueError(f"{what} have to be int64 in one dimension")
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= count):
        raise ValueError(f"{what} {indices.min()} to {indices.max()} are not all within 0 to {count - 1}")
