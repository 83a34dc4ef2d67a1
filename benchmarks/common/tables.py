"""Tables of results: medians, ranges, and ratios of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median and the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


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
