"""Folders that need not exist yet."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/swarm`, by default under `~/.cache`; None where there is no home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = given if given.is_absolute() else Path.home() / ".cache"  # the standard ignores relative paths
    except RuntimeError:
        return None
    return folder / "swarm"


def data_folder() -> Path | None:
    """`$XDG_DATA_HOME/swarm`, by default under `~/.local/share`, for what must not be lost; None where there is no
    home."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        folder = given if given.is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return folder / "swarm"


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: on its drive the folder would be."""
    return next((one for one in (folder, *folder.absolute().parents) if one.exists()), Path("/"))
