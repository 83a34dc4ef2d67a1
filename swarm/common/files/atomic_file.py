"""Small files, read and replaced as a whole: a reader finds either the old content or the new one."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def read_small(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises `ValueError` if it is larger, and reads no more than that."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or leave the one that is there as it was, even if the power fails. Only its owner may read it.

    A symbolic link is replaced, not followed. The folder must exist.

    Raises `OSError`; nothing is left beside the file then.
    """
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".swarm-unfinished-")  # made with mode 600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
