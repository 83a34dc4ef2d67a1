"""Measures how fast a drive reads at random places, small pieces and large ones."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from swarm.errors import NotEnoughSpace
from swarm.models.flash.reading import MAX_READ_BYTES, FileReader, Reads
from swarm.models.flash.records import allocate_aligned

SMALL_BYTES, LARGE_BYTES = 16 << 10, MAX_READ_BYTES
"""Sizes of the reads that are timed: about a neuron's, and the largest that are done."""

READS = 64
"""Reads that are begun together: about what a layer reads for a token."""

ROUNDS, MAX_S = 5, 1.0
"""How often each size is timed, unless that takes longer; the median counts."""

SCRATCH_BYTES, SCRATCH_S = 256 << 20, 1.0
"""The scratch file has as many bytes as could be written in this time, up to this size."""

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes a second of random reads.

    Attributes:
        direct: whether it was read past the page cache.
    """

    small: float
    large: float
    direct: bool


def measure_folder(folder: Path) -> DriveSpeed:
    """Measure the drive of a folder with a scratch file, which is removed.

    Raises `OSError` if the folder cannot be written, `NotEnoughSpace` if its drive is full, and `DriveFailed`.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".swarm-drive-") as scratch:
        _fill(scratch.fileno(), Path(folder))
        with closing(FileReader(Path(scratch.name))) as reader:
            small, large = (_bytes_per_second(reader, size) for size in (SMALL_BYTES, LARGE_BYTES))
            return DriveSpeed(small, large, reader.direct)


def _bytes_per_second(reader: FileReader, size: int) -> float:
    memory = allocate_aligned(READS * size).fill_(1)  # the first touch would count as reading
    random, times = np.random.default_rng(), list[float]()
    while not times or (len(times) < ROUNDS and sum(times) < MAX_S):
        offsets = np.sort(random.integers(0, reader.file_bytes // size, READS)) * size
        reads = Reads(offsets, np.full(READS, size), np.arange(READS) * size)
        reader.forget_cached()
        began = time.perf_counter()
        reader.begin(reads, memory).wait()
        times.append(time.perf_counter() - began)
    return READS * size / median(times)


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
