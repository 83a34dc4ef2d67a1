"""Opens packed files for reading, past the page cache or through it."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swarm.errors import InvalidOption, PackedFileError
from swarm.models.flash.reading.direct_reader import DirectReader
from swarm.models.flash.reading.kernel_aio import AsyncReads, KernelAio
from swarm.models.flash.reading.record_reader import FlashIo, RecordReader
from swarm.models.flash.reading.thread_reader import ThreadReader, reading_threads
from swarm.models.flash.records.record_layout import RECORD_ALIGNMENT


def open_reader(path: Path, io: FlashIo, calls: Callable[[], AsyncReads] = KernelAio) -> RecordReader:
    """Open a file for reading.

    Direct reads are asynchronous ones of the kernel, or done by threads where it has none or refuses them.

    Args:
        calls: makes the system calls for asynchronous reads; raises `OSError` where there are none.

    Raises `InvalidOption` if direct reads are asked for and the file system has none, and `PackedFileError` if the file
    cannot be opened.
    """
    try:
        if io is FlashIo.CACHED:
            return ThreadReader(path, _open_cached(path), io, reading_threads())
        descriptor = _open_direct(path)
    except OSError as error:
        if io is FlashIo.DIRECT and error.errno == errno.EINVAL:
            raise InvalidOption(
                f"the file system of {path} has no direct reads. Use --flash-io cached, or auto"
            ) from error
        raise PackedFileError(f"{path} cannot be opened: {error.strerror}. Run `swarm flash prepare` again") from error
    with suppress(OSError):
        return DirectReader(path, descriptor, calls())
    return ThreadReader(path, descriptor, io, reading_threads())


def _open_cached(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):  # records lie at random places: what follows one is not needed next
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _open_direct(path: Path) -> int:
    """Open a file past the page cache. Raises `OSError` with `EINVAL` if that cannot be done."""
    if sys.platform == "darwin":
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, "this system has no direct reads")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:  # some file systems say no only when they are read
        with mmap.mmap(-1, RECORD_ALIGNMENT) as aligned:
            os.preadv(descriptor, [aligned], 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
