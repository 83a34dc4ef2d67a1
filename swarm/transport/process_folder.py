"""A temporary folder that belongs to one process, and the removal of those whose process was killed.

A process that receives SIGKILL cannot remove its folder. Each folder therefore holds a file that its process keeps
locked; the kernel releases the lock when the process ends, however it ends. A folder whose lock is free belongs to no
living process, also where processes of several containers share the directory and cannot see each other's ids.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "swarm-"
LOCK_FILE = "process.lock"

MAX_DIRECTORY_CHARACTERS = 60
"""Length of the temporary directory's path. A socket's path may have 107 characters at most."""


class ProcessFolder:
    """A new folder for this process's sockets and short-lived files, locked until `remove` or the process's end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=_temporary_directory())
        try:
            self._lock = _create_lock(Path(self._folder.name))
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def leave(self) -> None:
        """Leave it to another process, which removes it."""
        self._folder._finalizer.detach()  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Delete the folder and everything in it. May be called more than once."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned_folders() -> int:
    """Delete the folders of processes that have ended without removing them, and return how many.

    Only folders of this user are touched, and symbolic links are never followed. Errors are logged, not raised.
    """
    directory = _temporary_directory()
    removed = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX) and _remove_if_abandoned(entry):
                    removed += 1
    except OSError as error:
        logger.debug("%s cannot be searched for abandoned folders: %s", directory, error)
    if removed:
        logger.info("Removed the temporary folders of killed processes: %d", removed)
    return removed


def _temporary_directory() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) < MAX_DIRECTORY_CHARACTERS else "/tmp"


def _create_lock(folder: Path) -> int | None:
    """Lock the folder and return the lock's descriptor, or None where the file system has no locks.

    The file gets its name only once it is locked, so that no other process ever finds it unlocked.
    """
    unnamed = folder / f"{LOCK_FILE}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        logger.debug("%s cannot be locked and stays if this process is killed: %s", folder, error)
        os.close(descriptor)
        return None
    unnamed.rename(folder / LOCK_FILE)
    return descriptor


def _remove_if_abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        lock = Path(entry.path) / LOCK_FILE
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it was removed meanwhile, or it has no lock and is not one of ours
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened = os.fstat(descriptor)
        # Another process may have removed the folder between the two calls.
        if not stat.S_ISREG(opened.st_mode) or opened.st_ino != os.lstat(lock).st_ino:
            return False
        shutil.rmtree(entry.path)  # does not follow links either
        return True
    except BlockingIOError:  # its process lives
        return False
    except OSError as error:
        logger.debug("%s cannot be removed: %s", entry.path, error)
        return False
    finally:
        with suppress(OSError):
            os.close(descriptor)
