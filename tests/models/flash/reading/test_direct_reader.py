"""Asynchronous reads whose system calls misbehave: the kernel does the reads, and the faults are put in between."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import DriveFailed
from swarm.models.flash.reading import aio_queue
from swarm.models.flash.reading.aio_queue import RETRIES
from swarm.models.flash.reading.direct_reader import DirectReader
from swarm.models.flash.reading.kernel_aio import CONTROL_BLOCK, KernelAio
from swarm.models.flash.reading.reads import Reads
from tests.models.flash.reading.files import UNIT, aligned_memory, random_file, reads_of_units

UNITS = 64


def _kernel_has_asynchronous_reads() -> bool:
    try:
        calls = KernelAio()
    except OSError:
        return False
    return (context := calls.setup(1)) >= 0 and calls.destroy(context) == 0


pytestmark = pytest.mark.skipif(not _kernel_has_asynchronous_reads(), reason="needs the kernel's asynchronous reads")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "block-7.records"
    random_file(path, UNITS)
    return path


def _reader(path: Path, calls: KernelAio, *, depth: int = 8, stall_s: float = 5.0) -> DirectReader:
    """A reader without O_DIRECT, which works on every file system: the kernel then reads while it accepts."""
    return DirectReader(path, os.open(path, os.O_RDONLY), calls, depth, stall_s)


def _everything() -> Reads:
    return reads_of_units(list(range(0, UNITS, 2)), list(range(0, UNITS, 2)), length=2)


class EventsChanged(KernelAio):
    """Calls that change the results of some reads.

    Args:
        change: gets the result of each read in the order of arrival, and returns another one.
    """

    def __init__(self, change: Callable[[int, int], int]) -> None:
        super().__init__()
        self._change, self._arrived = change, 0

    def collect(self, context: int, least: int, events: np.ndarray, timeout_s: float) -> int:
        count = super().collect(context, least, events, timeout_s)
        for event in events[: max(count, 0)]:
            event["result"] = self._change(self._arrived, int(event["result"]))
            self._arrived += 1
        return count


class Flaky(KernelAio):
    """Calls that accept only some reads, read only parts of them, and are interrupted, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._kept: list[np.ndarray] = []

    def submit(self, context: int, pointers: np.ndarray) -> int:
        if self._random.random() < 0.3:
            return -self._random.choice([errno.EAGAIN, errno.EINTR])
        some = pointers[: self._random.randint(1, len(pointers))]
        shorter = np.concatenate([_control_block(int(pointer)) for pointer in some])
        for block in shorter:
            if self._random.random() < 0.3:
                block["length"] = self._random.randint(1, int(block["length"]))
        self._kept.append(shorter)
        return super().submit(context, shorter.ctypes.data + np.arange(len(some), dtype=np.uint64) * 64)

    def collect(self, context: int, least: int, events: np.ndarray, timeout_s: float) -> int:
        if self._random.random() < 0.3:
            return -errno.EINTR
        return super().collect(context, 1, events[: self._random.randint(1, len(events))], timeout_s)


class Stalling(KernelAio):
    """A drive that accepts reads and does none of them before `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[int, np.ndarray]] | None = []

    def submit(self, context: int, pointers: np.ndarray) -> int:
        if self._held is None:
            return super().submit(context, pointers)
        blocks = np.concatenate([_control_block(int(pointer)) for pointer in pointers])
        blocks["descriptor"] = os.dup(int(blocks["descriptor"][0]))  # the kernel keeps files open too
        self._held.append((context, blocks))
        return len(pointers)

    def collect(self, context: int, least: int, events: np.ndarray, timeout_s: float) -> int:
        if self._held is None:
            return super().collect(context, least, events, timeout_s)
        time.sleep(timeout_s)
        return 0

    def go_on(self) -> None:
        held, self._held = self._held or [], None
        for context, blocks in held:
            pointers = blocks.ctypes.data + np.arange(len(blocks), dtype=np.uint64) * np.uint64(64)
            assert super().submit(context, pointers) == len(blocks)
            os.close(int(blocks["descriptor"][0]))


def _control_block(pointer: int) -> np.ndarray:
    """A copy of the control block at this address."""
    content = ctypes.string_at(pointer, CONTROL_BLOCK.itemsize)
    return np.frombuffer(content, CONTROL_BLOCK).copy()


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_whatever_the_kernel_does_all_bytes_arrive(path: Path, seed: int, depth: int) -> None:
    chance, reader = random.Random(seed), _reader(path, Flaky(seed), depth=depth)
    content, pending = path.read_bytes(), []
    for _ in range(3):
        sources = [chance.randrange(UNITS - 2) for _ in range(chance.randint(0, 20))]
        memory = aligned_memory(60)
        reads = reads_of_units(sources, [3 * place for place in range(len(sources))], length=3)
        pending.append((sources, memory, reader.begin(reads, memory)))
    chance.shuffle(pending)
    for sources, memory, read in pending:
        read.wait()
        for place, source in enumerate(sources):
            expected = content[source * UNIT : (source + 3) * UNIT]
            assert memory[3 * place * UNIT : 3 * (place + 1) * UNIT].numpy().tobytes() == expected
    reader.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EINVAL, errno.ENODATA])
def test_a_read_that_fails_names_itself_and_what_to_do(path: Path, error: int) -> None:
    reader = _reader(path, EventsChanged(lambda number, result: -error if number == 5 else result))
    memory = aligned_memory(UNITS)
    pending = reader.begin(_everything(), memory)
    for _ in range(2):
        with pytest.raises(
            DriveFailed, match=rf"8192 bytes at byte 40960 of block-7\.records.*{os.strerror(error)}.*Check"
        ):
            pending.wait()
    reader.begin(_everything(), memory).wait()  # the next token tries again
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


def test_a_failure_is_reported_only_when_nothing_is_on_its_way_anymore(path: Path) -> None:
    calls = EventsChanged(lambda number, result: -errno.EIO if number == 0 else result)
    reader, memory = _reader(path, calls, depth=2), aligned_memory(UNITS)
    with pytest.raises(DriveFailed):
        reader.begin(_everything(), memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


def test_a_read_that_never_brings_a_byte_fails(path: Path) -> None:
    tries = []

    def nothing(number: int, result: int) -> int:
        tries.append(number)
        return -errno.EAGAIN

    reader = _reader(path, EventsChanged(nothing))
    with pytest.raises(DriveFailed, match="Input/output error"):
        reader.begin(reads_of_units([0], [0]), aligned_memory(1)).wait()
    assert len(tries) == RETRIES + 1
    reader.close()


def test_the_file_ends_early(path: Path) -> None:
    reader = _reader(path, KernelAio())
    with pytest.raises(DriveFailed, match=r"the file ends before.*swarm flash prepare"):
        reader.begin(reads_of_units([UNITS - 1], [0], length=2), aligned_memory(2)).wait()
    reader.close()


def test_a_closed_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    reader = DirectReader(path, descriptor, KernelAio())
    os.close(descriptor)
    with pytest.raises(DriveFailed, match="Bad file descriptor"):
        reader.begin(_everything(), aligned_memory(UNITS)).wait()


def test_a_kernel_that_takes_nothing_is_a_stall(path: Path) -> None:
    class Full(KernelAio):
        def submit(self, context: int, pointers: np.ndarray) -> int:
            return -errno.EAGAIN

    reader = _reader(path, Full(), stall_s=0.05)
    with pytest.raises(DriveFailed, match="delivered nothing"):
        reader.begin(_everything(), aligned_memory(UNITS)).wait()
    reader.close()


def test_late_reads_never_meet_memory_that_is_used_again(path: Path) -> None:
    calls, memory = Stalling(), aligned_memory(UNITS)
    reader, another = _reader(path, calls, stall_s=0.05), _reader(path, KernelAio())
    stalled = reader.begin(reads_of_units([9], [0]), memory)
    with pytest.raises(DriveFailed, match=r"the drive of block-7\.records delivered nothing for 0 s.*Check"):
        stalled.wait()
    for refused in (reader, another):  # a late read would overwrite what another reader brings
        with pytest.raises(DriveFailed, match="delivered nothing"):
            refused.begin(_everything(), memory)
    with pytest.raises(DriveFailed, match="delivered nothing"):  # the drive has not answered yet
        reader.begin(_everything(), aligned_memory(UNITS))
    another.begin(_everything(), aligned_memory(UNITS)).wait()

    calls.go_on()
    for going_on in (reader, another):
        going_on.begin(_everything(), memory).wait()
        assert memory.numpy().tobytes() == path.read_bytes()
        going_on.close()
    with pytest.raises(DriveFailed):
        stalled.wait()  # what it asked for may have been overwritten since


def test_memory_of_reads_that_were_given_up_is_kept_until_they_have_ended(path: Path) -> None:
    array = np.zeros((UNITS + 1) * UNIT, dtype=np.uint8)
    kept, memory = weakref.ref(array), torch.from_numpy(array)
    memory, calls = memory[-memory.data_ptr() % UNIT :][: UNITS * UNIT], Stalling()
    reader = _reader(path, calls, depth=4, stall_s=0.05)
    pending = reader.begin(_everything(), memory)
    with pytest.raises(DriveFailed):
        pending.wait()
    reader.close()
    address = memory.data_ptr()
    del array, memory, pending, reader
    gc.collect()
    calls.go_on()
    late = (ctypes.c_char * (8 * UNIT)).from_address(address)  # of a live tensor only if it was kept
    assert bytes(late) == path.read_bytes()[: 8 * UNIT]
    another = _reader(path, KernelAio())
    another.begin(_everything(), aligned_memory(UNITS)).wait()  # any further read lets go of what has ended
    another.close()
    gc.collect()
    assert kept() is None


def test_a_full_queue_goes_on_while_nothing_waits(path: Path) -> None:
    reader, memory, content = _reader(path, KernelAio(), depth=2), aligned_memory(UNITS), path.read_bytes()
    for _ in range(3):
        memory.zero_()
        pending = reader.begin(_everything(), memory)
        until = time.monotonic() + 30
        while memory.numpy().tobytes() != content and time.monotonic() < until:
            time.sleep(0.001)
        assert memory.numpy().tobytes() == content
        pending.wait()
    reader.close()


def test_long_reads_are_begun_in_portions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Counting(KernelAio):
        def submit(self, context: int, pointers: np.ndarray) -> int:
            begun.append(len(pointers))
            return super().submit(context, pointers)

    monkeypatch.setattr(aio_queue, "MAX_BYTES_IN_FLIGHT", 6 * UNIT)
    reader, memory = _reader(path, Counting()), aligned_memory(UNITS)
    reader.begin(_everything(), memory).wait()
    assert memory.numpy().tobytes() == path.read_bytes()
    assert max(begun) == 3
    reader.begin(reads_of_units([0], [0], length=UNITS), memory).wait()  # a read longer than that goes alone
    reader.close()


def test_closing_waits_for_what_is_on_its_way(path: Path) -> None:
    reader, memory = _reader(path, KernelAio(), depth=2), aligned_memory(UNITS)
    reader.begin(_everything(), memory)
    reader.close()
    assert memory.numpy().tobytes() == path.read_bytes()
    reader.close()


@pytest.mark.parametrize(
    ("reads", "memory"),
    [
        (reads_of_units([0], [4]), aligned_memory(4)),
        (reads_of_units([0], [-1]), aligned_memory(4)),
        (reads_of_units([-1], [0]), aligned_memory(4)),
        (reads_of_units([0], [0], length=0), aligned_memory(4)),
        (Reads(np.array([512]), np.array([UNIT]), np.array([0])), aligned_memory(4)),
        (reads_of_units([0], [0]), aligned_memory(4)[512:]),
        (reads_of_units([0], [0]), aligned_memory(4).view(torch.int32)),
        (reads_of_units([0], [0]), aligned_memory(4).view(2, -1).T),
    ],
)
def test_nothing_is_read_outside_the_memory(path: Path, reads: Reads, memory: torch.Tensor) -> None:
    reader = _reader(path, KernelAio())
    with pytest.raises(ValueError, match=r"reads|records"):
        reader.begin(reads, memory)
    reader.close()
