"""Sizes, rates and times as people write them: `8 GB`, `100 Mbit/s`, `5 ms`. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "mbit/s": 1e6 / 8, "gbit/s": 1e9 / 8, "kbps": 1e3 / 8, "mbps": 1e6 / 8}
_RATES = _BITS | {"gbps": 1e9 / 8} | {f"{unit}/s": factor for unit, factor in _SIZES.items()}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class ByteSize(int):
    """Bytes, at most 1 EB."""

    @classmethod
    def read(cls, value: object) -> ByteSize:
        """From a number of bytes or a text such as `8GB` or `512 MiB`. Raises `ValueError`."""
        return cls(_read(value, _SIZES, 0, 10**18, "a size such as 8GB or 512 MiB"))


class BytesPerSecond(float):
    """Bytes a second, above 0."""

    @classmethod
    def read(cls, value: object) -> BytesPerSecond:
        """From a number of bytes/s or a text such as `100 Mbit/s` or `12 MB/s`. Raises `ValueError`."""
        return cls(_read(value, _RATES, 1, 10**18, "a bandwidth such as 100 Mbit/s or 12 MB/s"))


class Duration(float):
    """A time, at most an hour."""

    @classmethod
    def read(cls, value: object) -> Duration:
        """From a number of seconds or a text such as `5 ms`. Raises `ValueError`."""
        return cls(_read(value, _TIMES, 0, 3600, "a time such as 5 ms or 0.2 s"))


def _read(value: object, units: Mapping[str, float], least: float, most: float, expected: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        factor = units.get(match[2].lower()) if match[2] else 1
        number = float(match[1]) * factor if factor is not None else math.nan
    if not least <= number <= most:
        raise ValueError(f"{value!r} is not {expected}")
    return number


def human(size: float) -> str:
    """Bytes for people: `1.4 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
