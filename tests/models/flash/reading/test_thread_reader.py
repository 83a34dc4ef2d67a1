"""Reads by threads, and what they do when the drive fails or stalls."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.errors import DriveFailed
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.flash.reading.thread_reader import ReadingThreads, ThreadReader
from tests.models.flash.reading.files import UNIT, aligned_memory, random_file, reads_of_units

UNITS = 64
THREADS = ReadingThreads(4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "block-7.records"
    random_file(path, UNITS)
    return path


@pytest.fixture
def reader(path: Path) -> Iterator[ThreadReader]:
    reader = ThreadReader(path, os.open(path, os.O_RDONLY), FlashIo.CACHED, THREADS, stall_s=5.0)
    yield reader
    reader.close()


class Drive:
    """Takes the place of `os.preadv`: reads at most `most` bytes at once, fails at `broken`, waits while it stalls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = UNIT
        self.broken: dict[int, int] = {}
        self.reads = 0
        self.works = threading.Event()
        self.works.set()
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.reads += 1
        assert self.works.wait(60)
        if offset in self.broken:
            raise OSError(self.broken[offset], os.strerror(self.broken[offset]))
        return self._read(descriptor, [buffer[: self.most] for buffer in buffers], offset)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    drive = Drive(monkeypatch)
    yield drive
    drive.works.set()


@pytest.mark.parametrize("most", [1000, UNIT, 10 * UNIT])
def test_short_reads_are_continued(reader: ThreadReader, path: Path, drive: Drive, most: int) -> None:
    drive.most = most
    content, memory = path.read_bytes(), aligned_memory(UNITS)
    sources = np.random.default_rng(0).permutation(UNITS // 4) * 4
    reader.begin(reads_of_units(sources.tolist(), list(range(0, UNITS, 4)), length=4), memory).wait()
    for place, source in enumerate(sources.tolist()):
        expected = content[source * UNIT : (source + 4) * UNIT]
        assert memory[place * 4 * UNIT : (place + 1) * 4 * UNIT].numpy().tobytes() == expected


def test_a_read_that_fails_names_itself_and_what_to_do(reader: ThreadReader, path: Path, drive: Drive) -> None:
    drive.broken = {9 * UNIT: errno.EIO}
    memory = aligned_memory(UNITS)
    everything = reads_of_units(list(range(UNITS)), list(range(UNITS)))
    pending = reader.begin(everything, memory)
    for _ in range(2):
        with pytest.raises(
            DriveFailed, match=r"4096 bytes at byte 36864 of block-7\.records.*Input/output error.*Check"
        ):
            pending.wait()
    drive.broken = {}
    reader.begin(everything, memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()


def test_the_file_ends_early(reader: ThreadReader) -> None:
    with pytest.raises(DriveFailed, match=r"the file ends before.*swarm flash prepare"):
        reader.begin(reads_of_units([UNITS - 1], [0], length=2), aligned_memory(2)).wait()


def test_a_closed_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    reader = ThreadReader(path, descriptor, FlashIo.CACHED, THREADS)
    os.close(descriptor)
    with pytest.raises(DriveFailed, match="Bad file descriptor"):
        reader.begin(reads_of_units([0], [0]), aligned_memory(1)).wait()


def test_nothing_to_read(reader: ThreadReader) -> None:
    reader.begin(reads_of_units([], []), aligned_memory(1)).wait()


def test_a_stalled_drive(path: Path, drive: Drive) -> None:
    reader = ThreadReader(path, os.open(path, os.O_RDONLY), FlashIo.CACHED, THREADS, stall_s=0.05)
    drive.works.clear()
    memory = aligned_memory(UNITS)
    stalled = reader.begin(reads_of_units(list(range(UNITS)), list(range(UNITS))), memory)
    for _ in range(2):
        with pytest.raises(DriveFailed, match=r"the drive of block-7\.records delivered nothing.*Check"):
            stalled.wait()
    for other in (memory, memory[UNIT : 2 * UNIT], aligned_memory(1)):
        with pytest.raises(DriveFailed, match="delivered nothing"):
            reader.begin(reads_of_units([1], [0]), other)

    another = ThreadReader(path, os.open(path, os.O_RDONLY), FlashIo.CACHED, THREADS)
    for other in (memory, memory[UNIT : 2 * UNIT]):  # a late read would overwrite what this one brings
        with pytest.raises(DriveFailed, match="delivered nothing"):
            another.begin(reads_of_units([1], [0]), other)
    another.close()

    began = drive.reads
    drive.works.set()
    _wait_until_it_goes_on(reader, memory)
    assert drive.reads <= began + 1  # each thread came back from one read, and began none of the others
    reader.begin(reads_of_units(list(range(UNITS)), list(range(UNITS))), memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


def _wait_until_it_goes_on(reader: ThreadReader, memory: torch.Tensor) -> None:
    """Wait until the threads have come back from the stalled drive."""
    for _ in range(10_000):
        try:
            return reader.begin(reads_of_units([0], [0]), memory).wait()
        except DriveFailed:
            threading.Event().wait(0.001)
    raise AssertionError("the reader does not go on")


def test_closing_waits_for_what_is_on_its_way(path: Path, drive: Drive) -> None:
    reader = ThreadReader(path, os.open(path, os.O_RDONLY), FlashIo.CACHED, THREADS)
    memory = aligned_memory(UNITS)
    drive.works.clear()
    reader.begin(reads_of_units(list(range(UNITS)), list(range(UNITS))), memory)
    threading.Timer(0.02, drive.works.set).start()
    reader.close()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()
