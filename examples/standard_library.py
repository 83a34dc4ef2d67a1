"""Small data sets made from the standard library of the running Python.

They are real data that need no download and no permission: first sentences of docstrings, to be classified by topic,
and source code. A hash decides which examples are held out, so they are the same everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOPICS = {
    "windows": ("tkinter", "turtle.py", "curses"),
    "messages": (
        *("email", "ftplib.py", "http", "imaplib.py", "mailbox.py", "poplib.py", "smtplib.py", "socket.py"),
        *("socketserver.py", "ssl.py", "urllib", "wsgiref", "xmlrpc"),
    ),
}
"""Topic -> the modules that belong to it."""

HELD_OUT = 0.2
"""Fraction of the examples that is held out."""

LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "lib2to3", "turtledemo", "encodings"})


def _files(name: str = "") -> Iterator[Path]:
    """The library's files, of all modules or of one, in alphabetical order."""
    top = Path(sysconfig.get_paths()["stdlib"])
    place = top / name
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(top).parts):
            yield path


def _is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT


def _docstrings(path: Path) -> Iterator[str]:
    """The first paragraph of each docstring of classes and functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 20 <= len(text) <= 200:
                yield text


def docstrings(held_out: bool, most: int | None = None) -> list[tuple[str, int]]:
    """Texts and the number of their topic in `TOPICS`, shuffled: equally many of each topic, at most `most` in all."""
    found = []
    for modules in TOPICS.values():
        texts = {text for module in modules for path in _files(module) for text in _docstrings(path)}
        found.append(sorted(text for text in texts if _is_held_out(text) is held_out))
    chance = random.Random(0)
    each = min(map(len, found)) if most is None else min(most // len(found), *map(len, found))
    examples = [(text, topic) for topic, texts in enumerate(found) for text in chance.sample(texts, each)]
    chance.shuffle(examples)
    return examples


def sources(held_out: bool, characters: int) -> str:
    """Source code of some modules, with the given number of characters in total."""
    paths = [path for path in _files() if _is_held_out(path.name) is held_out and path.stat().st_size > 2000]
    random.Random(0).shuffle(paths)
    code = ""
    for path in paths:
        if len(code) >= characters:
            break
        code += path.read_text(encoding="utf-8", errors="replace") + "\n"
    return code[:characters]
