"""JSON from files, checked while it is read.

Each function takes a value that came out of a JSON document and returns it with the type and the range that it must
have. All raise `ValueError` otherwise, with a message that says what is wrong; a number is never infinite or NaN.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any


def parse_json(data: bytes | str) -> object:
    """The value of a JSON document, UTF-8. Raises `ValueError`, or `RecursionError` if it is nested too deep."""
    return json.loads(data if isinstance(data, str) else data.decode(), parse_constant=_refuse_constant)


def to_json(value: object, indent: int | None = None) -> bytes:
    """A JSON document, UTF-8; compact unless indented. Raises `ValueError` if it would not be valid JSON."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators).encode()


def fields(value: object, names: Sequence[str], optional: Sequence[str] = (), closed: bool = True) -> list[Any]:
    """The values of an object's fields: those of `names`, then those of `optional`, which are None where missing.

    Args:
        closed: refuse all other fields; else they are ignored.
    """
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with {', '.join(names)}, got {_kind(value)}")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    unknown = sorted(value.keys() - {*names, *optional})
    if closed and unknown:
        raise ValueError(f"unknown field {unknown[0][:64]!r}")
    return [value[name] for name in names] + [value.get(name) for name in optional]


def integer(value: object, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"expected a whole number from {low} to {high}, got {_kind(value)}")
    return value


def number(value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"expected a number from {low} to {high}, got {_kind(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError("a number is too large")
    return found


def text(value: object, max_length: int, pattern: str | None = None) -> str:
    """A string of at most `max_length` characters that matches the whole regular expression."""
    if not isinstance(value, str) or len(value) > max_length:
        raise ValueError(f"expected a text of at most {max_length} characters, got {_kind(value)}")
    if pattern is not None and re.fullmatch(pattern, value) is None:
        raise ValueError(f"{value[:64]!r} is not of the form {pattern}")
    value.encode()  # refuses a lone surrogate, which is not valid Unicode
    return value


def items(value: object, max_length: int | None = None, length: int | None = None) -> list[Any]:
    """The items of an array of at most `max_length`, or exactly `length` items."""
    if not isinstance(value, list):
        raise ValueError(f"expected an array, got {_kind(value)}")
    if (max_length is not None and len(value) > max_length) or length not in (None, len(value)):
        raise ValueError(f"expected {length if length is not None else f'up to {max_length}'} items, got {len(value)}")
    return value


def mapping(value: object) -> dict[str, Any]:
    """An object whose field names are data."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    """What an error message says of a value: a number itself, of anything else only what it is."""
    if isinstance(value, str):
        return "a text"
    if isinstance(value, (list, dict)):
        return "an array" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a larger number"
    return json.dumps(value)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
