"""The interface between a store and its ways of reading: many reads of one open file, begun together."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Protocol

import torch

from swarm.errors import DriveFailed
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT
from swarm.models.flash.records.weight_store import PendingRead

STALL_S = 10.0
"""A drive that delivers nothing for so long has failed. Drives answer in milliseconds, or after a spin-up or a reset of
a few seconds."""


class FlashIo(enum.StrEnum):
    """How packed files are read: past the page cache, or through it."""

    DIRECT = "direct"
    CACHED = "cached"


class RecordReader(Protocol):
    """Reads one open file into memory. Used by one thread at a time.

    Attributes:
        path: the file.
        io: whether it reads through the page cache.
        how: in words, for logs.
        file_bytes: size of the file when it was opened.
    """

    path: Path
    io: FlashIo
    how: str
    file_bytes: int

    def begin(self, reads: Reads, memory: torch.Tensor) -> PendingRead:
        """Begin reads and return while they are on their way.

        Args:
            memory: contiguous uint8 in the CPU's memory, with an address that is a multiple of `RECORD_ALIGNMENT`. It
                is kept until the last read has ended, even one that was given up.

        Raises `DriveFailed` while reads that were given up may still write into `memory`, and `ValueError` for reads
        outside `memory` or that are not aligned.
        """

    def forget_cached(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the drive."""

    def close(self) -> None:
        """Wait for what is in flight, as long as the drive delivers, and close the file."""


def check_reads(reads: Reads, memory: torch.Tensor) -> None:
    """Raise `ValueError` unless all reads are aligned and end inside `memory`: the kernel would write elsewhere."""
    if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.device.type != "cpu":
        raise ValueError("records are read into contiguous uint8 in the CPU's memory")
    if not len(reads):
        return
    edges = reads.offsets | reads.lengths | reads.places
    if memory.data_ptr() % RECORD_ALIGNMENT or bool((edges % RECORD_ALIGNMENT).any()):
        raise ValueError(f"reads have to be aligned to {RECORD_ALIGNMENT} bytes in the file and in memory")
    last = int((reads.places + reads.lengths).max())
    if int(reads.lengths.min()) <= 0 or int(min(reads.places.min(), reads.offsets.min())) < 0 or last > memory.nbytes:
        raise ValueError(f"the reads end at byte {last} of {memory.nbytes} bytes of memory, or begin before them")


def read_error(path: Path, offset: int, length: int, error: int) -> DriveFailed:
    """What the drive or its file system reported. `error` is an error number; 0 means that the file ended early."""
    what = f"{length} bytes at byte {offset} of {path.name} could not be read"
    if not error:
        return DriveFailed(f"{what}: the file ends before. Run `swarm flash prepare` again on that server")
    return DriveFailed(f"{what}: {os.strerror(error)}. Check that server's drive, or move the packed files to another")


def stall_error(path: Path, seconds: float) -> DriveFailed:
    """The drive delivers nothing."""
    return DriveFailed(
        f"the drive of {path.name} delivered nothing for {seconds:.0f} s. "
        "Check that server's drive, or move the packed files to another"
    )
