"""Which parts of a file are read into which parts of memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.models.flash.records.record_buffer import Indices

MAX_READ_BYTES = 1 << 20
"""Longer reads are cut, so that several are in flight. A multiple of `RECORD_ALIGNMENT`."""


@dataclass(frozen=True)
class Reads:
    """Reads that are begun together: bytes `offsets[i]` to `offsets[i] + lengths[i]` of a file go to `places[i]`.

    Attributes:
        offsets: bytes from the beginning of the file.
        lengths: bytes, above 0.
        places: bytes from the beginning of the memory that is read into.
    """

    offsets: Indices
    lengths: Indices
    places: Indices

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all reads."""
        return int(self.lengths.sum())


def coalesce(
    records: Indices, slots: Indices, stride: int, file_offset: int = 0, max_bytes: int = MAX_READ_BYTES
) -> Reads:
    """The reads that bring `records[i]` to `slots[i]`, in the order of the file.

    Records that are neighbors in the file and go to neighboring slots become one read; a read of more than `max_bytes`
    is cut. Gaps are never read over: a record between two others has no slot to go to.

    Args:
        stride: bytes from one record to the next, in the file and in memory.
        file_offset: where record 0 lies in the file.
    """
    order = np.argsort(records, kind="stable")
    records, slots = records[order], slots[order]
    breaks = np.flatnonzero((np.diff(records) != 1) | (np.diff(slots) != 1)) + 1
    first = np.concatenate(([0], breaks))[: len(records)]
    lengths = np.diff(first, append=len(records)) * stride
    pieces = -(-lengths // max_bytes)
    run = np.repeat(np.arange(len(first)), pieces)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
    return Reads(
        file_offset + records[first][run] * stride + skipped,
        np.minimum(lengths[run] - skipped, max_bytes),
        slots[first][run] * stride + skipped,
    )
