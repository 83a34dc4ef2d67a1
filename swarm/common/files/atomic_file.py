"""Files that are replaced as a whole: a reader finds either the old content or the new one."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


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
