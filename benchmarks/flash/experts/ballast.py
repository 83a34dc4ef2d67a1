"""Locked memory that leaves the page cache no more room than it should have, for baselines that depend on it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 256 << 20
CHECK_S = 0.05
SETTLED_CHECKS = 20
"""Checks without a change after which the ballast has found its size."""

MIN_AVAILABLE_BYTES = 3_000_000_000
"""What other programs are left, whatever is asked for."""


def available_bytes() -> int:
    """Memory that programs could still get, the page cache included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say what memory is available")


class Ballast:
    """Holds so much locked memory that `available` bytes are left, and lets go of some when others need memory.

    A context manager. While it is open, the kernel ends this process first if memory runs out after all.

    Raises `OSError` if memory cannot be locked: run as root, or raise the limit (`ulimit -l`).
    """

    def __init__(self, available: int) -> None:
        self._available = max(available, MIN_AVAILABLE_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._chunks: list[mmap.mmap] = []
        self._closing, self._settled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ballast", daemon=True)
        self._failure: OSError | None = None

    def __enter__(self) -> Ballast:
        Path("/proc/self/oom_score_adj").write_text("1000")
        self._thread.start()
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        while self._chunks:
            self._chunks.pop().close()

    def _run(self) -> None:
        unchanged = 0
        while not self._closing.wait(CHECK_S):
            available = available_bytes()
            unchanged += 1
            try:
                if available >= self._available + 2 * CHUNK_BYTES:
                    self._chunks.append(self._locked())
                    unchanged = 0
                elif available < self._available and self._chunks:
                    self._chunks.pop().close()
                    unchanged = 0
            except OSError as error:
                self._failure = error
            if unchanged >= SETTLED_CHECKS or self._failure is not None:
                self._settled.set()

    def _locked(self) -> mmap.mmap:
        chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(CHUNK_BYTES)):
            error = ctypes.get_errno()
            chunk.close()
            raise OSError(error, f"memory cannot be locked: {os.strerror(error)}; run as root, or raise `ulimit -l`")
        return chunk
