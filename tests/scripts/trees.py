"""Small source trees for tests of what reads source."""

from __future__ import annotations

import textwrap
from pathlib import Path


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Write a package `pkg` with these files, given by their paths inside it; returns its folder."""
    root = folder / "pkg"
    root.mkdir()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return root
