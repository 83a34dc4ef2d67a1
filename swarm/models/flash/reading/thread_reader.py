"""Reads with many threads, each of which waits for one read at a time: works on every system."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch

from swarm.errors import DriveFailed
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.reading.record_reader import STALL_S, FlashIo, check_reads, read_error, stall_error
from swarm.models.flash.reading.stalled_reads import STALLED

THREADS = 32
"""As many as "LLM in a flash" uses (section 4.1)."""

MAX_READS_PER_TASK = 8
"""Reads that a thread does one after the other, so that handing them out costs little."""


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


class ThreadReader:
    """A `RecordReader` by threads.

    Args:
        path: the file.
        descriptor: of the file; closed by `close`.
        io: whether the descriptor reads through the page cache.
        threads: those that read.
        stall_s: how long the drive may deliver nothing.
    """

    def __init__(
        self, path: Path, descriptor: int, io: FlashIo, threads: ReadingThreads, stall_s: float = STALL_S
    ) -> None:
        self.path, self._descriptor, self.io = path, descriptor, io
        self._threads, self._stall_s = threads, stall_s
        self._pending: list[ThreadRead] = []
        self.how = f"{io}, {threads.count} threads"
        self.file_bytes = os.fstat(descriptor).st_size

    def begin(self, reads: Reads, memory: torch.Tensor) -> ThreadRead:
        check_reads(reads, memory)
        self._pending = [pending for pending in self._pending if not pending.ended()]
        if STALLED.write_into(memory) or any(pending.given_up for pending in self._pending):
            raise stall_error(self.path, self._stall_s)
        tasks = min(len(reads), max(self._threads.count, -(-len(reads) // MAX_READS_PER_TASK)))
        pending = ThreadRead(self.path, self._descriptor, memory, self._stall_s)
        pending.begin(reads, tasks, self._threads)
        self._pending.append(pending)
        return pending

    def forget_cached(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for pending in self._pending:
            with suppress(DriveFailed):
                pending.wait()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class ThreadRead:
    """A `PendingRead` of a `ThreadReader`."""

    def __init__(self, path: Path, descriptor: int, memory: torch.Tensor, stall_s: float) -> None:
        self._path, self._descriptor, self._stall_s = path, descriptor, stall_s
        self._memory = memory
        self._bytes: memoryview = memory.view(-1).numpy().data
        self._changed = threading.Condition()
        self._tasks_left = 0
        self._reads_done = 0
        self._failure: DriveFailed | None = None
        self.given_up = False

    def begin(self, reads: Reads, tasks: int, threads: ReadingThreads) -> None:
        """Have threads do the reads; each task gets every `tasks`-th."""
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
                    STALLED.keep(self)
        if self.given_up:
            raise stall_error(self._path, self._stall_s)
        if self._failure is not None:
            raise self._failure

    def ended(self) -> bool:
        return not self._tasks_left

    def memory(self) -> list[torch.Tensor]:
        return [self._memory]

    def _read(self, reads: list[tuple[int, int, int]]) -> None:
        """A task: read one after the other, until one fails or nothing waits anymore."""
        for offset, length, place in reads:
            if self.given_up or self._failure is not None:
                break
            try:
                self._read_one(offset, length, place)
            except OSError as error:
                self._failure = read_error(self._path, offset, length, error.errno or errno.EIO)
            with self._changed:
                self._reads_done += 1
        with self._changed:
            self._tasks_left -= 1
            if not self._tasks_left:
                self._changed.notify_all()

    def _read_one(self, offset: int, length: int, place: int) -> None:
        while length:
            done = os.preadv(self._descriptor, [self._bytes[place : place + length]], offset)
            if not done:
                self._failure = read_error(self._path, offset, length, 0)
                return
            offset, length, place = offset + done, length - done, place + done
