"""Chooses how packed files are read, by trying both ways on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from swarm.common.units import format_bytes
from swarm.errors import InvalidOption
from swarm.models.flash.reading.drive_measurement import DriveProbe
from swarm.models.flash.reading.drive_speed import DriveSpeed
from swarm.models.flash.reading.open_reader import open_reader
from swarm.models.flash.reading.reads import MAX_READ_BYTES
from swarm.models.flash.reading.record_reader import FlashIo, RecordReader
from swarm.models.flash.records.record_buffer import allocate_aligned
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT

COMPARED_READS = 64
"""Reads that are begun together when ways of reading are compared: about what a layer reads for a token."""

COMPARISONS = 7
"""How often, in turns; the medians count."""


@dataclass(frozen=True)
class ComparedWay:
    """What comparing found out about one way of reading.

    Attributes:
        io: the way.
        how: in words.
        cold_seconds: for `COMPARED_READS` reads of the record's size, with nothing in the page cache.
        warm_seconds: for the same reads once more; the same as `cold_seconds` past the page cache.
    """

    io: FlashIo
    how: str
    cold_seconds: float
    warm_seconds: float

    def expected_seconds(self, page_cache_share: float) -> float:
        """The time if this share of what is read is in the page cache."""
        return (1 - page_cache_share) * self.cold_seconds + page_cache_share * self.warm_seconds


@dataclass(frozen=True)
class IoChoice:
    """How packed files are read.

    Attributes:
        io: the way of reading.
        speed: of the drive, read like this, with nothing in the page cache.
        reason: why, for a log line.
    """

    io: FlashIo
    speed: DriveSpeed
    reason: str


def choose_io(path: Path, requested: FlashIo | None, record_bytes: int, page_cache_share: float = 0.0) -> IoChoice:
    """Choose how to read packed files, and measure how fast that is. Takes one to three seconds.

    Args:
        path: a packed file; the others are expected on the same drive.
        requested: the way of --flash-io; None for "auto".
        record_bytes: from one record to the next.
        page_cache_share: share of what will be read that is expected in the page cache, see `page_cache`.

    Raises `InvalidOption` if direct reads are requested where there are none, `PackedFileError` and `DriveFailed`.
    """
    readers: dict[FlashIo, RecordReader] = {}
    with ExitStack() as opened:
        for io in (requested,) if requested else FlashIo:
            try:
                readers[io] = open_reader(path, io)
                opened.callback(readers[io].close)
            except InvalidOption:
                if requested:
                    raise
        if requested:
            io, reason = requested, f"{readers[requested].how}: as asked for"
        elif len(readers) == 1:
            [io] = readers
            reason = f"{readers[io].how}: the file system of {path} has no direct reads"
        else:
            file_bytes = min(reader.file_bytes for reader in readers.values())
            size = min(record_bytes, MAX_READ_BYTES, file_bytes // RECORD_ALIGNMENT * RECORD_ALIGNMENT)
            io, reason = quickest(_compare(list(readers.values()), size), size, page_cache_share)
        return IoChoice(io, DriveProbe(readers[io]).speed(record_bytes), reason)


def quickest(ways: Sequence[ComparedWay], size: int, page_cache_share: float) -> tuple[FlashIo, str]:
    """The quickest way for reads of `size` bytes, and why. Pure."""
    times = {way: way.expected_seconds(page_cache_share) for way in ways}
    best, *others = sorted(ways, key=times.__getitem__)
    said = f"{best.how}: {COMPARED_READS} reads of {format_bytes(size)} take {times[best] * 1e3:.1f} ms"
    said += "".join(f" ({other.how}: {times[other] * 1e3:.1f} ms)" for other in others)
    return best.io, f"{said}, if {page_cache_share:.0%} of what is read is in the page cache"


def _compare(readers: Sequence[RecordReader], size: int) -> list[ComparedWay]:
    """Time ways of reading in turns, so that whatever else uses the drive disturbs them alike."""
    memory = allocate_aligned(COMPARED_READS * size).fill_(1)
    probes = [DriveProbe(reader) for reader in readers]
    cold: list[list[float]] = [[] for _ in readers]
    warm: list[list[float]] = [[] for _ in readers]
    for _ in range(COMPARISONS):
        for place, probe in enumerate(probes):
            cold[place].append(probe.batch_seconds(COMPARED_READS, size, memory))
            if readers[place].io is FlashIo.CACHED:
                warm[place].append(probe.batch_seconds(COMPARED_READS, size, memory, again=True))
    return [
        ComparedWay(reader.io, reader.how, median(cold[place]), median(warm[place] or cold[place]))
        for place, reader in enumerate(readers)
    ]
