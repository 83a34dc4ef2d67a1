"""What this machine, or this container, has for its programs."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits (cgroup v2)."""


class ProcessorUse:
    """How much of all processors' time programs have used since this was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._seconds()

    def shares(self) -> tuple[float, float]:
        """What all programs have used, and this process alone; 0 to 1, and 0 after no time at all."""
        passed, used, own = (now - then for now, then in zip(self._seconds(), self._before, strict=True))
        return (min(1.0, used / passed), min(1.0, own / passed)) if passed > 0 else (0.0, 0.0)

    def others(self) -> float:
        """What other programs have used."""
        used, own = self.shares()
        return max(0.0, used - own)

    def _seconds(self) -> tuple[float, float, float]:
        """Processor time that has passed, that all have used, and this process alone."""
        times = psutil.cpu_times()
        passed = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # part of user and nice
        return passed, passed - times.idle - getattr(times, "iowait", 0.0), self._own_seconds()

    def _own_seconds(self) -> float:
        own = self._process.cpu_times()
        return float(own.user + own.system)


def available_memory() -> int:
    """Bytes that programs can allocate, in a container within its limit.

    What the page cache has is part of it: the kernel gives it to the program that needs it.
    """
    machine = int(psutil.virtual_memory().available)
    container = _container_memory(CGROUP)
    return machine if container is None else max(min(machine, container), 0)


def _container_memory(cgroup: Path) -> int | None:
    """What is left of the container's limit; None if it has none."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return None
    return limit - used + _page_cache(cgroup)


def _page_cache(cgroup: Path) -> int:
    """Bytes of files that count as the container's; those that shared memory has cannot be given back."""
    try:
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(counts["file"]) - int(counts["shmem"])
    except (OSError, ValueError, KeyError):
        return 0
