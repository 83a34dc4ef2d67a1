"""Batches of asynchronous reads on their way through one context of the kernel."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from swarm.models.flash.reading.kernel_aio import CONTROL_BLOCK, EVENT, AsyncReads
from swarm.models.flash.reading.queue_feeder import queue_feeder
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT

RETRIES = 16
"""How often the reads of a batch may come back without a byte and without an error before the batch fails."""

MAX_BYTES_IN_FLIGHT = 32 << 20
"""Fewer long reads than short ones keep a drive busy, and the kernel takes a while to accept each."""

_AGAIN = (-errno.EAGAIN, -errno.EINTR)
_NUMBER_BITS = 32


@dataclass(eq=False)
class Batch:
    """Reads that were begun together.

    Attributes:
        memory: what they read into, kept alive.
        blocks: their control blocks.
        longest: bytes of the longest read.
        pointers: addresses of control blocks in the order of submission. A read that came back short is in it again.
        submitted: how many of `pointers` the kernel was given.
        ended: how many of them have come back.
        retries: how many of them came back with nothing.
        failure: the first that failed: its offset, its length, and the error number, 0 if the file ended early.
        given_up: nothing waits for it anymore, because the drive stalls.
    """

    memory: torch.Tensor
    blocks: np.ndarray
    longest: int
    pointers: np.ndarray
    submitted: int = 0
    ended: int = 0
    retries: int = 0
    failure: tuple[int, int, int] | None = None
    given_up: bool = False

    @classmethod
    def of(cls, number: int, descriptor: int, reads: Reads, memory: torch.Tensor) -> Batch:
        blocks = np.zeros(len(reads), CONTROL_BLOCK)
        blocks["data"] = (number << _NUMBER_BITS) + np.arange(len(reads))
        blocks["descriptor"] = descriptor
        blocks["address"] = memory.data_ptr() + reads.places
        blocks["length"] = reads.lengths
        blocks["offset"] = reads.offsets
        addresses = blocks.ctypes.data + np.arange(len(reads), dtype=np.uint64) * np.uint64(CONTROL_BLOCK.itemsize)
        return cls(memory, blocks, int(reads.lengths.max(initial=1)), addresses)

    @property
    def missing(self) -> int:
        """Reads that have not come back."""
        return len(self.pointers) - self.ended

    def end(self, indices: np.ndarray, results: np.ndarray) -> None:
        """Reads have come back."""
        self.ended += len(indices)
        wrong = np.flatnonzero(results != self.blocks["length"][indices].astype(np.int64))
        for place in wrong:
            self._end_short(int(indices[place]), int(results[place]))

    def fail(self, index: int, error: int) -> None:
        """A read cannot be done."""
        block = self.blocks[index]
        self.failure = self.failure or (int(block["offset"]), int(block["length"]), error)

    def give_up(self) -> None:
        """Wait only for what the kernel was given."""
        self.given_up = True
        self.pointers = self.pointers[: self.submitted]

    def _end_short(self, index: int, result: int) -> None:
        """A read has come back with an error or too few bytes: do the rest again, or fail."""
        done = result // RECORD_ALIGNMENT * RECORD_ALIGNMENT if result > 0 else 0
        if result == 0 or (result < 0 and result not in _AGAIN):
            return self.fail(index, -result)
        if not done:
            self.retries += 1
            if self.retries > RETRIES:
                return self.fail(index, errno.EIO)
        block = self.blocks[index : index + 1]
        block["offset"] += done
        block["address"] += done
        block["length"] -= done
        self.pointers = np.append(self.pointers, np.uint64(block.ctypes.data))


class AioQueue:
    """A context of the kernel, and the batches that go through it, in the order in which they were begun.

    Used by one thread, beside the one that feeds it.

    Args:
        calls: the system calls.
        depth: how many reads are in flight at most.

    Attributes:
        given_up: nothing waits for its batches anymore.

    Raises `OSError` if the kernel refuses: without asynchronous reads, in a container that forbids them, or because
    all programs together have reached the limit `fs.aio-max-nr`.
    """

    def __init__(self, calls: AsyncReads, depth: int) -> None:
        context = calls.setup(depth)
        if context < 0:
            raise OSError(-context, os.strerror(-context))
        self._calls, self._context, self._depth = calls, context, depth
        self._events = np.zeros(depth, EVENT)
        self._batches: dict[int, Batch] = {}
        self._to_submit: deque[Batch] = deque()
        self._in_flight = 0
        self._next_number = 0
        self._lock = threading.Lock()
        self.given_up = False

    def begin(self, descriptor: int, reads: Reads, memory: torch.Tensor) -> Batch:
        """Add a batch and submit what there is room for. A thread submits the rest, unless something waits."""
        with self._lock:
            number, self._next_number = self._next_number, (self._next_number + 1) % 2**_NUMBER_BITS
            batch = self._batches[number] = Batch.of(number, descriptor, reads, memory)
            self._to_submit.append(batch)
            self._collect(0, 0.0)
            self._submit()
            full = bool(self._to_submit)
        if full:
            queue_feeder().feed(self)
        return batch

    def feed(self) -> bool:
        with self._lock:
            if self._to_submit:
                with suppress(OSError):  # what waits for the reads meets it too
                    self._collect(0, 0.0)
                self._submit()
            return bool(self._to_submit)

    def wait(self, batch: Batch, stall_s: float) -> bool:
        """Wait until a batch has ended. Returns False if nothing at all came back for `stall_s`. Raises `OSError`."""
        with self._lock:
            return self._wait(batch, stall_s)

    def _wait(self, batch: Batch, stall_s: float) -> bool:
        progress = time.monotonic()
        while batch.missing:
            self._submit()
            left = progress + stall_s - time.monotonic()
            # While reads wait for their turn, half of the queue is enough to make it worth to go on.
            least = min(batch.missing, self._in_flight if not self._to_submit else max(1, self._in_flight // 2))
            if self._collect(least, max(left, 0.0)):
                progress = time.monotonic()
            elif left <= 0:
                return False
            elif not self._in_flight:
                time.sleep(min(left, 0.001))  # the kernel had no room for a single read
        return True

    def batches(self) -> list[Batch]:
        """Those that have not ended."""
        return list(self._batches.values())

    def give_up(self) -> None:
        """Submit nothing more. From here on, the queue only keeps the memory of what is in flight."""
        with self._lock:
            self.given_up = True
            self._to_submit.clear()
            for batch in self._batches.values():
                batch.give_up()

    def memory(self) -> list[torch.Tensor]:
        return [batch.memory for batch in self.batches()]

    def ended(self) -> bool:
        with self._lock:
            self._collect(0, 0.0)
        if not self._in_flight:
            self.close()
        return self.closed

    @property
    def closed(self) -> bool:
        return self._context < 0

    def close(self) -> None:
        """Remove the context. Waits without limit for what is in flight."""
        with self._lock:
            if not self.closed:
                self._calls.destroy(self._context)
                self._context = -1

    def _submit(self) -> None:
        """Give the kernel as many reads as there is room for."""
        while self._to_submit:
            batch = self._to_submit[0]
            room = min(self._depth, max(MAX_BYTES_IN_FLIGHT // batch.longest, 1)) - self._in_flight
            if room <= 0:
                break
            pointers = batch.pointers[batch.submitted : batch.submitted + room]
            if not len(pointers):
                self._to_submit.popleft()
                continue
            accepted = self._calls.submit(self._context, pointers)
            if accepted == 0 or accepted in _AGAIN:
                break
            if accepted < 0:  # this is about the first of them; the others are tried in the next round
                batch.fail(int(pointers[0] - batch.blocks.ctypes.data) // CONTROL_BLOCK.itemsize, -accepted)
                batch.submitted += 1
                batch.ended += 1
            else:
                batch.submitted += accepted
                self._in_flight += accepted
        self._forget_ended()

    def _collect(self, least: int, timeout_s: float) -> int:
        """Take in what has come back. Returns how many reads did."""
        if not self._in_flight:
            return 0
        count = self._calls.collect(self._context, least, self._events, timeout_s)
        if count == -errno.EINTR:
            return 0
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        self._in_flight -= count
        events = self._events[:count]
        numbers = events["data"] >> np.uint64(_NUMBER_BITS)
        indices = (events["data"] & np.uint64(2**_NUMBER_BITS - 1)).astype(np.int64)
        for number in np.unique(numbers):
            batch, its = self._batches[int(number)], numbers == number
            batch.end(indices[its], events["result"][its])
            if batch.submitted < len(batch.pointers) and batch not in self._to_submit and not self.given_up:
                self._to_submit.append(batch)
        self._forget_ended()
        return count

    def _forget_ended(self) -> None:
        for number in [number for number, batch in self._batches.items() if not batch.missing]:
            del self._batches[number]
