"""Sizes, rates and times in their usual notation: `8 GB`, `100 Mbit/s`, `5 ms`. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_SIZE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_RATE_UNITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "mbit/s": 1e6 / 8, "gbit/s": 1e9 / 8}
_RATE_UNITS |= {"kbps": 1e3 / 8, "mbps": 1e6 / 8, "gbps": 1e9 / 8}
_RATE_UNITS |= {f"{unit}/s": factor for unit, factor in _SIZE_UNITS.items()}
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class ByteSize(int):
    """A number of bytes, at most 1 EB."""

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Parse a number of bytes or a text such as `8GB` or `512 MiB`. Raises `ValueError`."""
        return cls(_parse_quantity(value, _SIZE_UNITS, 0, 10**18, "a size such as 8GB or 512 MiB"))


class BytesPerSecond(float):
    """A bandwidth in bytes per second, above 0."""

    @classmethod
    def parse(cls, value: object) -> BytesPerSecond:
        """Parse a number of bytes/s or a text such as `100 Mbit/s` or `12 MB/s`. Raises `ValueError`."""
        return cls(_parse_quantity(value, _RATE_UNITS, 1, 10**18, "a bandwidth such as 100 Mbit/s or 12 MB/s"))


class Duration(float):
    """A time in seconds, at most an hour."""

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Parse a number of seconds or a text such as `5 ms`. Raises `ValueError`."""
        return cls(_parse_quantity(value, _TIME_UNITS, 0, 3600, "a time such as 5 ms or 0.2 s"))


def _parse_quantity(value: object, units: Mapping[str, float], least: float, most: float, expected: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        factor = units.get(match[2].lower()) if match[2] else 1
        number = float(match[1]) * factor if factor is not None else math.nan
    if not least <= number <= most:
        raise ValueError(f"{value!r} is not {expected}")
    return number


def format_bytes(size: float) -> str:
    """Format a number of bytes for display: `1.4 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
