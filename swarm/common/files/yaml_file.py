"""Reads YAML files written by hand: bounded in size, checked against a type, with errors that name the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from swarm.errors import UsageError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Without merge keys (`<<`): a few lines of them, each merging the one before twice, make more entries than fit
    into any memory."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys are not supported", key.start_mark)


def read_file(path: Path, parse: Callable[[bytes], T], kind: str, error: type[UsageError]) -> T:
    """Read a file and parse its content with `parse`. Raises `error`, with the path in front.

    Args:
        kind: what the file should contain, for error messages.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise error(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, so it is not a {kind}")
    try:
        return parse(data)
    except error as problem:
        raise error(f"{path}: {problem}") from None


def parse_yaml(data: bytes, kind: type[T], error: type[UsageError], **options: Any) -> T:
    """Convert YAML to the msgspec type `kind`. Raises `error`, which names the line or the field.

    Args:
        options: passed to `msgspec.convert`.
    """
    try:
        content = yaml.load(data, _Loader)
    except RecursionError:
        raise error("invalid YAML: it is nested too deeply") from None
    except Exception as problem:  # noqa: BLE001  (foreign input: an impossible date raises anything)
        raise error(f"invalid YAML: {_describe_yaml_error(problem)}") from None
    try:
        converted: T = msgspec.convert(content, kind, **options)
    except msgspec.ValidationError as problem:
        what, _, place = str(problem).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        raise error(f"{field}: {what}" if field else what) from None
    return converted


def _describe_yaml_error(problem: Exception) -> str:
    mark = getattr(problem, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    what = str(getattr(problem, "problem", None) or problem) or type(problem).__name__
    return where + what.splitlines()[0]
