"""Reading records with threads: what arrives, and what happens when the drive fails or stalls."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.flash.memory_store import MemoryStore
from swarm.errors import DriveFailed, PackedFileError
from swarm.models.flash.reading import FileReader, FlashStore, ReadingThreads, Reads, coalesce
from swarm.models.flash.records import (
    RECORD_ALIGNMENT,
    Indices,
    RecordBuffer,
    RecordLayout,
    allocate_aligned,
)

UNIT = RECORD_ALIGNMENT
UNITS = 64
STRIDE = 2 * UNIT
COUNT, WIDTH = 96, 1500
THREADS = ReadingThreads(4)


def aligned_memory(units: int) -> torch.Tensor:
    return allocate_aligned(units * UNIT).zero_()


def reads_of_units(sources: list[int], targets: list[int], length: int = 1) -> Reads:
    """Reads of `length` units each, from these units of the file to those of the memory."""
    lengths = np.full(len(sources), length * UNIT)
    return Reads(np.array(sources, dtype=np.int64) * UNIT, lengths, np.array(targets, dtype=np.int64) * UNIT)


EVERYTHING = reads_of_units(list(range(UNITS)), list(range(UNITS)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "block-7.records"
    path.write_bytes(np.random.default_rng(0).bytes(UNITS * UNIT))
    return path


@pytest.fixture(params=["direct", "cached"])
def reader(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileReader]:
    """A reader of a file system with and without direct reads."""
    if request.param == "cached":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    reader = FileReader(path, THREADS, stall_s=5.0)
    assert reader.direct <= (request.param == "direct")
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
        return self._read(descriptor, [memoryview(buffer)[: self.most] for buffer in buffers], offset)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    drive = Drive(monkeypatch)
    yield drive
    drive.works.set()


# Which bytes go where


@st.composite
def requests(draw: st.DrawFn) -> tuple[Indices, Indices]:
    """Records in runs, as predictors and prompts ask for them, and a slot of its own for each."""
    runs = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=6))
    records = np.concatenate([np.arange(start, start + length) for start, length in runs] or [np.arange(0)])
    slots = np.arange(len(records)) + draw(st.integers(0, 5))
    if draw(st.booleans()):
        slots = np.array(draw(st.permutations(slots.tolist())), dtype=np.int64)
    order = np.array(draw(st.permutations(range(len(records)))), dtype=np.int64)
    return records[order].astype(np.int64), slots[order].astype(np.int64)


def units_read(offsets: Indices, lengths: Indices, places: Indices) -> dict[int, int]:
    """For each unit of memory that is written, the unit of the file that goes there."""
    return {
        place + done: offset + done
        for offset, length, place in zip(offsets.tolist(), lengths.tolist(), places.tolist(), strict=True)
        for done in range(0, length, UNIT)
    }


@given(requests(), st.integers(1, 9), st.integers(0, 3))
def test_each_record_comes_to_its_slot(requests: tuple[Indices, Indices], units: int, file_units: int) -> None:
    records, slots = requests
    reads = coalesce(records, slots, STRIDE, file_units * UNIT, units * UNIT)
    naive = units_read(file_units * UNIT + records * STRIDE, np.full(len(records), STRIDE), slots * STRIDE)
    assert units_read(reads.offsets, reads.lengths, reads.places) == naive
    assert reads.nbytes == len(records) * STRIDE
    assert all(0 < length <= units * UNIT for length in reads.lengths.tolist())


def test_neighbors_are_read_as_one_and_long_runs_in_pieces() -> None:
    reads = coalesce(np.array([7, 3, 4, 5]), np.array([9, 0, 1, 2]), STRIDE)
    assert reads.offsets.tolist() == [3 * STRIDE, 7 * STRIDE]
    assert reads.lengths.tolist() == [3 * STRIDE, STRIDE]
    assert reads.places.tolist() == [0, 9 * STRIDE]
    pieces = coalesce(np.arange(10), np.arange(10), STRIDE, max_bytes=4 * STRIDE)
    assert pieces.lengths.tolist() == [4 * STRIDE, 4 * STRIDE, 2 * STRIDE]
    assert len(coalesce(np.arange(0), np.arange(0), STRIDE)) == 0


def test_nothing_is_read_outside_the_memory(reader: FileReader) -> None:
    for reads, memory in (
        (reads_of_units([0], [4]), aligned_memory(4)),
        (reads_of_units([0], [-1]), aligned_memory(4)),
        (reads_of_units([-1], [0]), aligned_memory(4)),
        (reads_of_units([0], [0], length=0), aligned_memory(4)),
        (Reads(np.array([512]), np.array([UNIT]), np.array([0])), aligned_memory(4)),
        (reads_of_units([0], [0]), aligned_memory(4)[512:]),
        (reads_of_units([0], [0]), aligned_memory(4).view(torch.int32)),
        (reads_of_units([0], [0]), aligned_memory(4).view(2, -1).T),
    ):
        with pytest.raises(ValueError, match=r"reads|records"):
            reader.begin(reads, memory)


# One file


@pytest.mark.parametrize("most", [UNIT, 3 * UNIT])
def test_short_reads_are_continued(reader: FileReader, path: Path, drive: Drive, most: int) -> None:
    drive.most = most
    content, memory = path.read_bytes(), aligned_memory(UNITS)
    sources = np.random.default_rng(0).permutation(UNITS // 4) * 4
    reader.begin(reads_of_units(sources.tolist(), list(range(0, UNITS, 4)), length=4), memory).wait()
    for place, source in enumerate(sources.tolist()):
        expected = content[source * UNIT : (source + 4) * UNIT]
        assert memory[place * 4 * UNIT : (place + 1) * 4 * UNIT].numpy().tobytes() == expected


def test_a_read_that_fails_names_itself_and_what_to_do(reader: FileReader, path: Path, drive: Drive) -> None:
    drive.broken = {9 * UNIT: errno.EIO}
    memory = aligned_memory(UNITS)
    pending = reader.begin(EVERYTHING, memory)
    for _ in range(2):
        with pytest.raises(
            DriveFailed, match=r"4096 bytes at byte 36864 of block-7\.records.*Input/output error.*Check"
        ):
            pending.wait()
    drive.broken = {}
    reader.begin(EVERYTHING, memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()


@pytest.mark.parametrize("cut", [UNIT, 1000])
def test_the_file_ends_early(reader: FileReader, path: Path, tmp_path: Path, cut: int) -> None:
    short = tmp_path / "block-7.records"
    short.write_bytes(path.read_bytes()[:-cut])
    reader = FileReader(short, THREADS)
    with pytest.raises(DriveFailed, match=r"the file ends before.*prepares it again"):
        reader.begin(reads_of_units([UNITS - 2], [0], length=2), aligned_memory(2)).wait()
    reader.close()


@pytest.mark.parametrize("refused", ["open", "first read"])
def test_a_file_system_without_direct_reads(refused: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no direct reads")
    really_open, really_read, direct = os.open, os.preadv, set[int]()

    def open_file(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = really_open(path, flags & ~os.O_DIRECT)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", preadv)
    before = len(os.listdir("/proc/self/fd"))
    reader, memory = FileReader(path, THREADS), aligned_memory(UNITS)
    assert not reader.direct
    reader.begin(EVERYTHING, memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


# A drive that stalls


def test_a_stalled_drive(path: Path, drive: Drive) -> None:
    reader, another = FileReader(path, THREADS, stall_s=0.05), FileReader(path, THREADS)
    drive.works.clear()
    memory = aligned_memory(UNITS)
    stalled = reader.begin(EVERYTHING, memory)
    for _ in range(2):
        with pytest.raises(DriveFailed, match=r"the drive of block-7\.records delivered nothing.*Check"):
            stalled.wait()
    for refused, other in (
        (reader, memory),
        (reader, aligned_memory(1)),  # the drive has not answered yet
        (another, memory),  # a late read would overwrite what another reader brings
        (another, memory[UNIT : 2 * UNIT]),
    ):
        with pytest.raises(DriveFailed, match="delivered nothing"):
            refused.begin(reads_of_units([1], [0]), other)
    another.close()

    began = drive.reads
    drive.works.set()
    wait_until_it_goes_on(reader, memory)
    assert drive.reads <= began + 1  # each thread came back from one read, and began none of the others
    reader.begin(EVERYTHING, memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


def wait_until_it_goes_on(reader: FileReader, memory: torch.Tensor) -> None:
    """Wait until the threads have come back from the stalled drive."""
    for _ in range(10_000):
        try:
            return reader.begin(reads_of_units([0], [0]), memory).wait()
        except DriveFailed:
            threading.Event().wait(0.001)
    raise AssertionError("the reader does not go on")


def test_memory_of_reads_that_were_given_up_is_kept_until_they_have_ended(path: Path, drive: Drive) -> None:
    array = np.zeros((UNITS + 1) * UNIT, dtype=np.uint8)
    kept, memory = weakref.ref(array), torch.from_numpy(array)
    memory = memory[-memory.data_ptr() % UNIT :][: UNITS * UNIT]
    reader = FileReader(path, THREADS, stall_s=0.05)
    drive.works.clear()
    pending = reader.begin(reads_of_units([0], [0]), memory)
    with pytest.raises(DriveFailed):
        pending.wait()
    address = memory.data_ptr()
    del array, memory, pending, reader
    gc.collect()
    assert kept() is not None
    drive.works.set()
    another = FileReader(path, THREADS)
    for _ in range(1000):  # any further read lets go of what has ended
        another.begin(reads_of_units([0], [0]), aligned_memory(1)).wait()
        gc.collect()
        if kept() is None:
            break
        late = bytes((ctypes.c_char * UNIT).from_address(address))
        assert late in (bytes(UNIT), path.read_bytes()[:UNIT])
    assert kept() is None
    another.close()


def test_closing_waits_for_what_is_on_its_way(path: Path, drive: Drive) -> None:
    reader, memory = FileReader(path, THREADS), aligned_memory(UNITS)
    drive.works.clear()
    reader.begin(EVERYTHING, memory)
    threading.Timer(0.02, drive.works.set).start()
    reader.close()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


# A store


TENSORS = {
    "up": torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(0)),
    "down": torch.randn(WIDTH, COUNT, generator=torch.Generator().manual_seed(1)),
}
LAYOUT = RecordLayout.of({name: tuple(t.shape) for name, t in TENSORS.items()}, {"up": 0, "down": 1}, torch.float32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    buffer = RecordBuffer(LAYOUT, COUNT)
    buffer.data.zero_()
    MemoryStore(LAYOUT, TENSORS).read(np.arange(COUNT), buffer, np.arange(COUNT)).wait()
    path = tmp_path_factory.mktemp("packed") / "block-3.records"
    path.write_bytes(buffer.data.numpy().tobytes())
    return path


@pytest.fixture
def store(packed: Path) -> Iterator[FlashStore]:
    opened = FlashStore.open(packed, LAYOUT)
    yield opened
    opened.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.integers(0, COUNT - 1), max_size=COUNT), st.randoms())
def test_records_come_to_their_slots(store: FlashStore, records: list[int], chance: random.Random) -> None:
    slots = list(range(COUNT))
    chance.shuffle(slots)
    if len(records) % 2:  # as often in runs as scattered
        records, slots = sorted(set(records)), list(range(COUNT))
    slots = slots[: len(records)]
    buffer = RecordBuffer(LAYOUT, COUNT)
    store.read(np.array(records, dtype=np.int64), buffer, np.array(slots, dtype=np.int64)).wait()
    assert torch.equal(buffer.field("up")[slots], TENSORS["up"][records])
    assert torch.equal(buffer.field("down")[slots], TENSORS["down"].T[records])


def test_a_file_that_is_too_short_is_refused(packed: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.records"
    short.write_bytes(packed.read_bytes()[:-4096])
    with pytest.raises(PackedFileError, match="prepare"):
        FlashStore.open(short, LAYOUT)
