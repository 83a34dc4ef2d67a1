"""What this machine, or this container, has for its programs."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits (cgroup v2)."""


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
