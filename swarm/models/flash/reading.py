"""Reads records from packed files: many at once, by threads, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from swarm.errors import DriveFailed, PackedFileError
from swarm.models.flash.records import (
    RECORD_ALIGNMENT,
    FinishedRead,
    Indices,
    PendingRead,
    RecordBuffer,
    RecordLayout,
    StoreCounters,
)

MAX_READ_BYTES = 1 << 20
"""Longer reads are cut, so that several are in flight. A multiple of `RECORD_ALIGNMENT`."""

STALL_S = 10.0
"""A drive that delivers nothing for so long has failed. Drives answer in milliseconds, or after a spin-up or a reset of
a few seconds."""

THREADS = 32
"""As many as "LLM in a flash" uses (section 4.1)."""

MAX_READS_PER_TASK = 8
"""Reads that a thread does one after the other, so that handing them out costs little."""


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
        return int(self.lengths.sum())

    def check(self, memory: torch.Tensor) -> None:
        """Raise `ValueError` unless all reads are aligned and end inside `memory`: the kernel would write elsewhere."""
        if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.device.type != "cpu":
            raise ValueError("records are read into contiguous uint8 in the CPU's memory")
        if not len(self):
            return
        edges = self.offsets | self.lengths | self.places
        if memory.data_ptr() % RECORD_ALIGNMENT or bool((edges % RECORD_ALIGNMENT).any()):
            raise ValueError(f"reads have to be aligned to {RECORD_ALIGNMENT} bytes in the file and in memory")
        last, first = int((self.places + self.lengths).max()), int(min(self.places.min(), self.offsets.min()))
        if int(self.lengths.min()) <= 0 or first < 0 or last > memory.nbytes:
            raise ValueError(f"the reads end at byte {last} of {memory.nbytes} bytes of memory, or begin before them")


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


class ReadingThreads:
    """Threads that run functions. They end with the process, even while the drive keeps one of them waiting."""

    def __init__(self, count: int = THREADS) -> None:
        self.count = count
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._run, name=f"swarm-reading-{number}", daemon=True).start()

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread run `task`, which must not raise."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()


@cache
def reading_threads() -> ReadingThreads:
    """The threads that all readers of this process share."""
    return ReadingThreads()


class FileReader:
    """Reads one open file into memory. Used by one thread at a time.

    Args:
        path: the file.
        threads: those that read.
        stall_s: how long the drive may deliver nothing.

    Attributes:
        file_bytes: size of the file when it was opened.
        direct: whether it is read past the page cache.

    Raises `PackedFileError` if the file cannot be opened.
    """

    def __init__(self, path: Path, threads: ReadingThreads | None = None, stall_s: float = STALL_S) -> None:
        self.path, self.stall_s = path, stall_s
        self._threads = threads or reading_threads()
        self._pending: list[FileRead] = []
        try:
            self.descriptor, self.direct = _opened(path)
        except OSError as error:
            raise PackedFileError(f"{path} cannot be opened: {error.strerror}. Start the server again") from error
        self.file_bytes = os.fstat(self.descriptor).st_size

    def begin(self, reads: Reads, memory: torch.Tensor) -> FileRead:
        """Begin reads and return while they are on their way.

        Args:
            memory: contiguous uint8 in the CPU's memory, at a multiple of `RECORD_ALIGNMENT`. It is kept until the last
                read has ended, even one that was given up.

        Raises `DriveFailed` while reads that were given up may still write into `memory`, and `ValueError` for reads
        outside `memory` or that are not aligned.
        """
        reads.check(memory)
        self._pending = [pending for pending in self._pending if not pending.ended]
        if given_up_reads_of(memory) or any(pending.given_up for pending in self._pending):
            raise _stall_error(self.path, self.stall_s)
        pending = FileRead(self, memory)
        pending.begin(reads, self._threads)
        self._pending.append(pending)
        return pending

    def forget_cached(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the drive."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for what is in flight, as long as the drive delivers, and close the file."""
        for pending in self._pending:
            with suppress(DriveFailed):
                pending.wait()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class FileRead:
    """A `PendingRead` of a `FileReader`."""

    def __init__(self, reader: FileReader, memory: torch.Tensor) -> None:
        self.memory = memory
        self.given_up = False
        self._path, self._descriptor, self._direct = reader.path, reader.descriptor, reader.direct
        self._stall_s = reader.stall_s
        self._bytes: memoryview = memory.view(-1).numpy().data
        self._changed = threading.Condition()
        self._tasks_left = 0
        self._reads_done = 0
        self._failure: DriveFailed | None = None

    @property
    def ended(self) -> bool:
        """Whether no thread can write into the memory anymore."""
        return not self._tasks_left

    def begin(self, reads: Reads, threads: ReadingThreads) -> None:
        """Have threads do the reads."""
        tasks = min(len(reads), max(threads.count, -(-len(reads) // MAX_READS_PER_TASK)))
        self._tasks_left = tasks
        offsets, lengths, places = reads.offsets.tolist(), reads.lengths.tolist(), reads.places.tolist()
        for task in range(tasks):
            its = slice(task, None, tasks)
            threads.run(partial(self._read, list(zip(offsets[its], lengths[its], places[its], strict=True))))

    def wait(self) -> None:
        with self._changed:
            while self._tasks_left and not self.given_up:
                done = self._reads_done
                if not self._changed.wait(self._stall_s) and done == self._reads_done and self._tasks_left:
                    self.given_up = True
                    _keep_given_up(self)
        if self.given_up:
            raise _stall_error(self._path, self._stall_s)
        if self._failure is not None:
            raise self._failure

    def _read(self, reads: list[tuple[int, int, int]]) -> None:
        """A task: read one after the other, until one fails or nothing waits anymore."""
        for offset, length, place in reads:
            if self.given_up or self._failure is not None:
                break
            try:
                self._read_one(offset, length, place)
            except OSError as error:
                self._failure = _read_error(self._path, offset, length, error.errno or errno.EIO)
            with self._changed:
                self._reads_done += 1
        with self._changed:
            self._tasks_left -= 1
            if not self._tasks_left:
                self._changed.notify_all()

    def _read_one(self, offset: int, length: int, place: int) -> None:
        while length:
            done = os.preadv(self._descriptor, [self._bytes[place : place + length]], offset)
            if not done or (self._direct and done < length and done % RECORD_ALIGNMENT):
                self._failure = _read_error(self._path, offset, length, 0)
                return
            offset, length, place = offset + done, length - done, place + done


# A read cannot be taken back. When a drive stalls, computing goes on without the records, but the drive may deliver
# them later. If their memory had been freed by then, they would overwrite whatever lies there; if it was read into
# again, old records would overwrite new ones. So reads that were given up are kept here, with their memory.
_given_up: list[FileRead] = []
_given_up_lock = threading.Lock()


def _keep_given_up(read: FileRead) -> None:
    with _given_up_lock:
        _given_up.append(read)


def given_up_reads_of(memory: torch.Tensor) -> bool:
    """Whether reads of this process that were given up may still write into `memory`. Lets go of those that ended."""
    if not _given_up:
        return False
    storage = memory.untyped_storage().data_ptr()
    with _given_up_lock:
        _given_up[:] = [read for read in _given_up if not read.ended]
        return any(read.memory.untyped_storage().data_ptr() == storage for read in _given_up)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor that reads past the page cache, or through it if that cannot be done; and which it is."""
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            return _opened_past_cache(path), True
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor, True
    if hasattr(os, "posix_fadvise"):  # records lie at random places: what follows one is not needed next
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor, False


def _opened_past_cache(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:  # some file systems refuse only when they are read
        with mmap.mmap(-1, RECORD_ALIGNMENT) as aligned:
            os.preadv(descriptor, [aligned], 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_error(path: Path, offset: int, length: int, error: int) -> DriveFailed:
    """What the drive or its file system reported. `error` is an error number; 0 means that the file ended early."""
    what = f"{length} bytes at byte {offset} of {path.name} could not be read"
    if not error:
        return DriveFailed(f"{what}: the file ends before. Start that server again, which prepares it again")
    return DriveFailed(f"{what}: {os.strerror(error)}. Check that server's drive, or move the packed files to another")


def _stall_error(path: Path, seconds: float) -> DriveFailed:
    return DriveFailed(
        f"the drive of {path.name} delivered nothing for {seconds:.0f} s. "
        "Check that server's drive, or move the packed files to another"
    )


class FlashStore:
    """The `WeightStore` of one block's packed file, which was verified before.

    A read that fails leaves anything in its slots. If the drive stalls, late records may still be written there: until
    a later `read` into the same buffer was accepted, which the store refuses as long as that can happen, nothing else
    may be put into these slots.

    Args:
        reader: of the file; closed with the store.
        layout: of the records.

    Raises `PackedFileError` if the file is too short for the layout.
    """

    def __init__(self, reader: FileReader, layout: RecordLayout) -> None:
        if reader.file_bytes < layout.file_bytes:
            reader.close()
            raise PackedFileError(
                f"{reader.path} has {reader.file_bytes} bytes; its {layout.count} records need {layout.file_bytes}. "
                "Start the server again, which prepares it again"
            )
        self.layout = layout
        self.counters = StoreCounters()
        self._reader = reader

    @classmethod
    def open(cls, path: Path, layout: RecordLayout) -> FlashStore:
        """Open a packed file. Raises `PackedFileError`."""
        return cls(FileReader(path), layout)

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        _check_indices("records", records, self.layout.count)
        _check_indices("slots", slots, buffer.slots)
        if len(records) != len(slots) or buffer.layout.stride != self.layout.stride:
            raise ValueError(f"{len(records)} records of {self.layout.stride} bytes do not go to {len(slots)} slots")
        if not len(records):
            return FinishedRead()
        reads = coalesce(records, slots, self.layout.stride)
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
