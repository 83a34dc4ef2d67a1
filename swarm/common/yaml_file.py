"""Files that people write by hand, in YAML: read within bounds, checked against a type, wrong fields named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from swarm.errors import UsageError

T = TypeVar("T")

MAX_FILE = 1 << 20


def read(path: Path, parse: Callable[[bytes], T], kind: str, error: type[UsageError]) -> T:
    """What `parse` makes of the file's content. Raises `error`, with the path in front.

    Args:
        kind: what the file should be, for people.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    if len(data) > MAX_FILE:
        raise error(f"{path} is larger than {MAX_FILE >> 20} MiB, so it is no {kind}")
    try:
        return parse(data)
    except error as problem:
        raise error(f"{path}: {problem}") from None


def convert(data: bytes, kind: type[T], error: type[UsageError], **options: Any) -> T:
    """YAML as an instance of the msgspec type `kind`. Raises `error` that names the line or the field.

    Args:
        options: of `msgspec.convert`.
    """
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: no such date, a number of thousands of digits
        raise error(f"no YAML: {_what_and_where(problem)}") from None
    except RecursionError:
        raise error("no YAML of this kind: it is nested too deeply") from None
    try:
        converted: T = msgspec.convert(content, kind, **options)
    except msgspec.ValidationError as problem:
        what, _, place = str(problem).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        raise error(f"{field}: {what}" if field else what) from None
    return converted


def _what_and_where(problem: Exception) -> str:
    mark = getattr(problem, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + str(getattr(problem, "problem", None) or problem).splitlines()[0]
