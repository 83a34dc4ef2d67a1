"""Reads past the page cache, with the kernel's asynchronous reads: no thread and no copy."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from swarm.errors import DriveFailed
from swarm.models.flash.reading.aio_queue import AioQueue, Batch
from swarm.models.flash.reading.kernel_aio import AsyncReads
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.reading.record_reader import STALL_S, FlashIo, check_reads, read_error, stall_error
from swarm.models.flash.reading.stalled_reads import STALLED

DEPTH = 128
"""Reads in flight at most."""


class DirectReader:
    """A `RecordReader` by O_DIRECT and asynchronous reads.

    Reads beyond `depth` are submitted while something waits. After a stall, the kernel's context stays behind with what
    is in flight, and the reader goes on with a new one once those reads have ended.

    Args:
        path: the file.
        descriptor: of the file, opened with O_DIRECT; closed by `close`.
        calls: the system calls.
        stall_s: how long the drive may deliver nothing.

    Raises `OSError` if the kernel has no asynchronous reads, or refuses them.
    """

    io = FlashIo.DIRECT
    how = "direct, asynchronous reads"

    def __init__(
        self, path: Path, descriptor: int, calls: AsyncReads, depth: int = DEPTH, stall_s: float = STALL_S
    ) -> None:
        self._queue = AioQueue(calls, depth)
        self.path, self._descriptor = path, descriptor
        self._calls, self._depth, self._stall_s = calls, depth, stall_s
        self.file_bytes = os.fstat(descriptor).st_size

    def begin(self, reads: Reads, memory: torch.Tensor) -> DirectRead:
        check_reads(reads, memory)
        if STALLED.write_into(memory) or (self._queue.given_up and not self._queue.closed):
            raise stall_error(self.path, self._stall_s)
        if self._queue.closed:
            self._queue = AioQueue(self._calls, self._depth)
        return DirectRead(self, self._queue, self._queue.begin(self._descriptor, reads, memory))

    def wait(self, queue: AioQueue, batch: Batch) -> None:
        """Wait for a batch of a queue of this reader. Raises `DriveFailed`."""
        if not batch.given_up and not queue.wait(batch, self._stall_s):
            queue.give_up()
            STALLED.keep(queue)
        if batch.given_up:
            raise stall_error(self.path, self._stall_s)
        if batch.failure is not None:
            raise read_error(self.path, *batch.failure)

    def forget_cached(self) -> None:
        """There is nothing to forget: the page cache has no part in this."""

    def close(self) -> None:
        for batch in self._queue.batches():
            with suppress(DriveFailed):
                self.wait(self._queue, batch)
        if not self._queue.given_up:
            self._queue.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class DirectRead:
    """A `PendingRead` of a `DirectReader`."""

    def __init__(self, reader: DirectReader, queue: AioQueue, batch: Batch) -> None:
        self._reader, self._queue, self._batch = reader, queue, batch

    def wait(self) -> None:
        self._reader.wait(self._queue, self._batch)
