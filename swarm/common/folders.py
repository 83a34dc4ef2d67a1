"""Folders that need not exist yet."""

from __future__ import annotations

from pathlib import Path


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: on its drive the folder would be."""
    return next((one for one in (folder, *folder.absolute().parents) if one.exists()), Path("/"))
