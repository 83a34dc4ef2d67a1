"""Tables of results: medians, ranges, and ratios of the same round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def show(value: float, digits: int | None = None) -> str:
    """Format with so many digits behind the point; None for three significant ones, and all before the point."""
    if digits is None:
        digits = min(max(2 - math.floor(math.log10(abs(value))), 0), 4) if value else 0
    return f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Format the median and the range; a single value alone."""
    middle, low, high = (show(one, digits) for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def times(values: Sequence[float], others: Sequence[float]) -> str:
    """Format how many times `others` the values are, round by round."""
    return spread(quotients(values, others))


def quotients(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """How many times `others` the values are, round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format in Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
