"""Measures how fast a file is read: at random places, by size and by number of reads in flight."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from swarm.errors import InvalidOption, NotEnoughSpace
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.reads import MAX_READ_BYTES, Reads
from swarm.models.flash.reading.record_reader import FlashIo, RecordReader
from swarm.models.flash.records.record_buffer import allocate_aligned
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT

READ_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, MAX_READ_BYTES)
BATCH_READS = (1, 4, 16, 64)
ROUNDS = 3
"""How often each size and number is tried; the median counts."""

MEASUREMENT_S = 2.0
"""About how long a measurement takes at most. A slow drive is measured with fewer reads at once, and once."""

SCRATCH_BYTES = 256 << 20
SCRATCH_S = 1.0
"""A scratch file is as long as could be written in this time, and at most `SCRATCH_BYTES`."""

_PIECE_BYTES = 4 << 20


class DriveProbe:
    """Times batches of random reads of one file.

    Args:
        reader: of a file of at least `RECORD_ALIGNMENT` bytes.
        seed: chooses the places.
    """

    def __init__(self, reader: RecordReader, seed: int | None = None) -> None:
        if reader.file_bytes < RECORD_ALIGNMENT:
            raise ValueError(f"{reader.path} is too short to be measured")
        self._reader = reader
        self._random = np.random.default_rng(seed)

    def speed(self, record_bytes: int = 0, seconds: float = MEASUREMENT_S) -> DriveSpeed:
        """Measure the usual sizes and numbers of reads, and reads of `record_bytes` unless these are longer than all.

        Raises `DriveFailed`.
        """
        sizes = _sizes(self._reader.file_bytes, record_bytes)
        memory = allocate_aligned(BATCH_READS[-1] * sizes[-1]).fill_(1)  # the first touch would count as reading
        longest = median(self.batch_seconds(BATCH_READS[1], sizes[-1], memory) for _ in range(ROUNDS)) / BATCH_READS[1]
        counts = _counts(longest * len(sizes), seconds)
        cells = {(size, count): list[float]() for size in sizes for count in counts}
        until, rounds = time.monotonic() + seconds, 0
        while rounds < ROUNDS and (not rounds or time.monotonic() < until):
            for (size, count), times in cells.items():
                times.append(self.batch_seconds(count, size, memory))
            rounds += 1
        grid = tuple(tuple(median(cells[size, count]) for count in counts) for size in sizes)
        return DriveSpeed(str(self._reader.io), counts, sizes, grid)

    def batch_seconds(self, count: int, size: int, memory: torch.Tensor, again: bool = False) -> float:
        """The time for `count` random reads of `size` bytes from the drive. Raises `DriveFailed`.

        Args:
            memory: at least `count * size` bytes, aligned.
            again: time reading the same bytes a second time, when they may come from the page cache.
        """
        places = self._reader.file_bytes // size
        offsets = np.sort(self._random.choice(places, count, replace=places < count)).astype(np.int64) * size
        reads = Reads(offsets, np.full(count, size), np.arange(count) * size)
        self._reader.forget_cached()
        if again:
            self._reader.begin(reads, memory).wait()
        began = time.perf_counter()
        self._reader.begin(reads, memory).wait()
        return time.perf_counter() - began


def measure_folder(folder: Path, io: FlashIo | None = None) -> DriveSpeed:
    """Measure the drive of a folder with a scratch file, which is removed.

    Args:
        io: None for direct reads where the file system has them, else cached ones.

    Raises `OSError` if the folder cannot be written, `NotEnoughSpace` if its drive is full, and `DriveFailed`.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".swarm-drive-") as scratch:
        _fill(scratch.fileno(), Path(folder))
        reader = _open(Path(scratch.name), io)
        try:
            return DriveProbe(reader).speed()
        finally:
            reader.close()


def _fill(descriptor: int, folder: Path) -> None:
    """Write random bytes, which no file system can compress, for `SCRATCH_S`, and have them on the drive."""
    piece, until = os.urandom(_PIECE_BYTES), time.monotonic() + SCRATCH_S
    status = os.statvfs(folder)
    room = min(SCRATCH_BYTES, status.f_bavail * status.f_frsize // 2)
    if room < _PIECE_BYTES:
        raise NotEnoughSpace(f"the drive of {folder} is full: its speed cannot be measured. Free some space")
    written = 0
    while written + _PIECE_BYTES <= room and (not written or time.monotonic() < until):
        written += os.write(descriptor, piece)
        os.fsync(descriptor)


def _open(path: Path, io: FlashIo | None) -> RecordReader:
    try:
        return open_reader(path, io or FlashIo.DIRECT)
    except InvalidOption:
        if io is not None:
            raise
        return open_reader(path, FlashIo.CACHED)


def _counts(seconds_of_one: float, seconds: float) -> tuple[int, ...]:
    """How many reads to begin together, so that all batches take about `seconds` at most, or a few for a slow drive.

    Args:
        seconds_of_one: a read of each size.
    """
    fitting = [count for count in (2, 3, 4) if sum(BATCH_READS[:count]) * seconds_of_one < seconds]
    return BATCH_READS[: max(fitting, default=2)]


def _sizes(file_bytes: int, record_bytes: int) -> tuple[int, ...]:
    """The sizes to measure, ascending, for a file that may be shorter than some of them."""
    sizes = {size for size in READ_BYTES if size <= file_bytes}
    if RECORD_ALIGNMENT <= record_bytes <= min(MAX_READ_BYTES, file_bytes):
        sizes.add(record_bytes)
    return tuple(sorted(sizes))
