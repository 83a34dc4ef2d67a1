"""A folder that one process uses at a time: that of a worker, or of a starter."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from swarm.common.files.folders import data_folder
from swarm.errors import FolderInUse, InvalidOption

_LOCK = "lock"


def default_folder(name: str) -> Path:
    """The folder for a worker's or a starter's own files. Raises `InvalidOption` if there is no home directory."""
    folder = data_folder()
    if folder is None:
        raise InvalidOption("this user has no home folder; say with --folder where this machine's part is kept")
    return folder / name


class LockedFolder:
    """A folder, made if it is missing, that is this process's own until `close`.

    Args:
        whose: such as "worker", for messages.

    Raises:
        FolderInUse: another process has it.
        InvalidOption: it cannot be used.
    """

    def __init__(self, path: Path, whose: str) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidOption(f"--folder {path} cannot be used: {error.strerror}; name another one") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise FolderInUse(
                f"another {whose} of this machine runs in {path}: end it, or give this one a folder of its own with "
                "--folder"
            ) from None

    def close(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)
