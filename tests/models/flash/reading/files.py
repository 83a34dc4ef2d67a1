"""Files with random bytes, memory to read them into, and every way of reading that works on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from swarm.models.flash.reading.direct_reader import DirectReader
from swarm.models.flash.reading.kernel_aio import AsyncReads
from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.record_layout import RECORD_ALIGNMENT

UNIT = RECORD_ALIGNMENT


def random_file(path: Path, units: int) -> bytes:
    """Write a file of random bytes and return them."""
    content = np.random.default_rng(0).bytes(units * UNIT)
    path.write_bytes(content)
    return content


def aligned_memory(units: int) -> torch.Tensor:
    """Memory whose address is a multiple of the alignment, filled with zeros."""
    memory = torch.zeros((units + 1) * UNIT, dtype=torch.uint8)
    start = -memory.data_ptr() % UNIT
    return memory[start : start + units * UNIT]


def reads_of_units(sources: list[int], targets: list[int], length: int = 1) -> Reads:
    """Reads of `length` units each, from these units of the file to those of the memory."""
    lengths = np.full(len(sources), length * UNIT)
    return Reads(np.array(sources, dtype=np.int64) * UNIT, lengths, np.array(targets, dtype=np.int64) * UNIT)


def asynchronous_reader(path: Path, calls: AsyncReads, *, depth: int = 8, stall_s: float = 5.0) -> DirectReader:
    """A reader by asynchronous reads. Without O_DIRECT, so that it works on every file system: the kernel then reads
    while it accepts, and everything else is the same."""
    return DirectReader(path, os.open(path, os.O_RDONLY), calls, depth, stall_s)
