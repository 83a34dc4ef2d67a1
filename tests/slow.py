"""Which of a test's parameters `make test` tries, and which only `make test-slow` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *quick: Any, unpack: bool = False) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all of them marked slow but those in `quick`.

    Args:
        unpack: each value is a tuple for several parameters.
    """
    values = list(values)
    assert all(value in values for value in quick), "a quick value that is not among the values"
    slow = pytest.mark.slow
    return [value if value in quick else pytest.param(*(value if unpack else (value,)), marks=slow) for value in values]
