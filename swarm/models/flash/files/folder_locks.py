"""Locks between processes that use packed files.

Two locks for each model's folder: one is held while blocks are prepared, the other, shared, while blocks are in use. So
a server can use some blocks while another process prepares others, and nothing is removed under a server. The files of
the locks lie outside the folder and are never removed: a lock on a removed file protects nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from swarm.errors import PackedFileError
from swarm.models.flash.files.block_files import PackedModel

logger = logging.getLogger(__name__)

LOCKS_FOLDER = ".locks"
PREPARING = "preparing"
USED = "used"


@contextmanager
def preparation_lock(model: PackedModel) -> Iterator[None]:
    """Keep other processes from preparing blocks of this model. Waits, with a message, until it is their turn.

    Raises `PackedFileError` if the folder cannot be written, or if its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            descriptor = _opened(_path(model.root, model.folder_name, PREPARING), stack)
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                logger.info("Another process is preparing blocks of %s: waiting until it has finished", model.name)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise unusable_folder(model.root, error) from None
        yield


class UseLock:
    """Keeps a model's packed files from being removed, until it is closed or the process ends."""

    def __init__(self, model: PackedModel) -> None:
        self._stack = ExitStack()
        # A user who may only read the folder needs no lock: its files can only be removed by others, and what is open
        # stays readable.
        with suppress(OSError):
            descriptor = _opened(_path(model.root, model.folder_name, USED), self._stack)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)

    def close(self) -> None:
        """Let go."""
        self._stack.close()


@contextmanager
def removal_lock(root: Path, folder_name: str) -> Iterator[bool]:
    """Keep other processes from preparing and using a model's packed files; False if one of them does.

    Raises `PackedFileError` if the folder cannot be written, or if its file system has no locks.
    """
    with ExitStack() as stack:
        try:
            descriptors = [_opened(_path(root, folder_name, purpose), stack) for purpose in (PREPARING, USED)]
            free = all(_try_lock(descriptor, fcntl.LOCK_EX) for descriptor in descriptors)
        except OSError as error:
            raise unusable_folder(root, error) from None
        yield free


def last_used(root: Path, folder_name: str) -> float | None:
    """When a process last began to use these packed files (seconds since 1970), or None if never."""
    try:
        return _path(root, folder_name, USED).stat().st_mtime
    except OSError:
        return None


def unusable_folder(root: Path, error: OSError) -> PackedFileError:
    """The error for a folder that cannot be written or locked."""
    return PackedFileError(
        f"the folder for packed weights, {root}, cannot be used ({error.strerror or error}); "
        "choose a folder on a local drive with --cache-dir"
    )


def _opened(path: Path, stack: ExitStack) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stack.callback(os.close, descriptor)
    return descriptor


def _try_lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _path(root: Path, folder_name: str, purpose: str) -> Path:
    return root / LOCKS_FOLDER / f"{folder_name}.{purpose}"
