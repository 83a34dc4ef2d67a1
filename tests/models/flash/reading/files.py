"""Files with random bytes, and memory to read them into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from swarm.models.flash.reading.reads import Reads
from swarm.models.flash.records.record_buffer import allocate_aligned
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT

UNIT = RECORD_ALIGNMENT


def random_file(path: Path, units: int) -> bytes:
    """Write a file of random bytes and return them."""
    content = np.random.default_rng(0).bytes(units * UNIT)
    path.write_bytes(content)
    return content


def aligned_memory(units: int) -> torch.Tensor:
    """Memory whose address is a multiple of the alignment, filled with zeros."""
    return allocate_aligned(units * UNIT).zero_()


def reads_of_units(sources: list[int], targets: list[int], length: int = 1) -> Reads:
    """Reads of `length` units each, from these units of the file to those of the memory."""
    lengths = np.full(len(sources), length * UNIT)
    return Reads(np.array(sources, dtype=np.int64) * UNIT, lengths, np.array(targets, dtype=np.int64) * UNIT)
