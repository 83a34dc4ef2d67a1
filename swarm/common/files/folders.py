"""Folders that need not exist yet."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/swarm`, by default under `~/.cache`; None where there is no home."""
    return _own_folder("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path | None:
    """`$XDG_DATA_HOME/swarm`, by default under `~/.local/share`, for what must not be lost; None where there is no
    home."""
    return _own_folder("XDG_DATA_HOME", ".local/share")


def _own_folder(variable: str, default: str) -> Path | None:
    given = Path(os.environ.get(variable, ""))
    try:
        folder = given if given.is_absolute() else Path.home() / default  # the standard ignores relative paths
    except RuntimeError:
        return None
    return folder / "swarm"


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: on its drive the folder would be."""
    return next((one for one in (folder, *folder.absolute().parents) if one.exists()), Path("/"))
