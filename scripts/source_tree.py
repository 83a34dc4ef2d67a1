"""Reads the Python files of a package into syntax trees. Nothing is imported or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NOT_ENTRIES = frozenset({"__init__.py", "__pycache__", "py.typed"})
"""Names that every package holds and that tell a reader nothing."""


@dataclass(frozen=True)
class Module:
    """A parsed Python file.

    Attributes:
        name: dotted, such as `swarm.server.push`. An `__init__.py` has the name of its package.
        path: relative to the folder that holds the package, such as `swarm/server/push.py`.
        lines: physical lines, as `wc -l` counts them.
        tree: the file's syntax tree.
    """

    name: str
    path: str
    lines: int
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether the file is an `__init__.py`."""
        return PurePosixPath(self.path).name == "__init__.py"

    def place(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        """Where a node stands, as `path:line`."""
        return f"{self.path}:{node.lineno}"


def parse_module(path: str, text: str) -> Module:
    """Parse one file. Raises `SyntaxError`, which names the file."""
    parts = PurePosixPath(path).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    return Module(name, path, lines, ast.parse(text, filename=path))


def read_modules(root: Path) -> list[Module]:
    """Parse all Python files below a package's folder, in the order of their paths."""
    root = root.resolve()
    files = sorted(file for file in root.rglob("*.py") if not _is_hidden(file.relative_to(root)))
    return [parse_module(file.relative_to(root.parent).as_posix(), file.read_text("utf-8")) for file in files]


def read_folders(root: Path) -> dict[str, list[str]]:
    """The names of the files and folders in each folder of a package, without hidden ones and `NOT_ENTRIES`.

    A folder that shows none, such as one of which only a `__pycache__` is left, is not an entry of its parent.
    """
    root = root.resolve()
    return {folder.relative_to(root.parent).as_posix(): names for folder, names in _entries_below(root).items()}


def _entries_below(folder: Path) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {folder: []}
    for child in sorted(folder.iterdir()):
        if child.name in NOT_ENTRIES or _is_hidden(Path(child.name)):
            continue
        below = _entries_below(child) if child.is_dir() else {}
        found |= below
        if not child.is_dir() or below[child]:
            found[folder].append(child.name)
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
