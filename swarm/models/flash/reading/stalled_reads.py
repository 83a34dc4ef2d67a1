"""Keeps the memory of reads that were given up until the kernel has let go of it.

A read cannot be taken back. When a drive stalls, computing goes on without the records, but the drive may deliver them
later. If their memory had been freed by then, they would overwrite whatever lies there; if it was read into again,
old records would overwrite new ones.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch


class GivenUpReads(Protocol):
    """Reads for which nothing waits anymore."""

    def ended(self) -> bool:
        """Whether none of them can write into memory anymore. Never waits."""

    def memory(self) -> list[torch.Tensor]:
        """What those write into that have not ended."""


class StalledReads:
    """All reads of this process that were given up and have not ended. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[GivenUpReads] = []

    def keep(self, reads: GivenUpReads) -> None:
        """Keep reads, and with them their memory, until they have ended."""
        with self._lock:
            self._kept.append(reads)

    def write_into(self, memory: torch.Tensor) -> bool:
        """Whether some may still write into `memory`. Lets go of those that have ended."""
        if not self._kept:
            return False
        storage = memory.untyped_storage().data_ptr()
        with self._lock:
            self._kept = [reads for reads in self._kept if not reads.ended()]
            return any(
                other.untyped_storage().data_ptr() == storage for reads in self._kept for other in reads.memory()
            )


STALLED = StalledReads()
"""Those of this process: another reader may read into the same memory."""
