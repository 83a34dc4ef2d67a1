"""Ends a run of the tests in time: what has not begun when the time is up is skipped, and said to be.

SWARM_TESTS_UNTIL   seconds since 1970 after which no test begins
SWARM_TESTS_FIRST   any text; it says with which module to begin, so that it is not always the same ones that are
                    left over. Continuous integration gives the commit
"""

from __future__ import annotations

import os
import time
import zlib

import pytest

UNTIL, FIRST = "SWARM_TESTS_UNTIL", "SWARM_TESTS_FIRST"


class TimeBox:
    """A plugin of pytest.

    Args:
        until: see above.
        first: see above; empty to leave the tests in their order.
    """

    def __init__(self, until: float, first: str) -> None:
        self._until, self._first = until, first

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        modules = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
        order = {module: place for place, module in enumerate(rotated(modules, self._first))}
        items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() >= self._until:
            pytest.skip(f"not begun: the time was up ({UNTIL})")


def rotated(modules: list[str], first: str) -> list[str]:
    """The modules in their order, but beginning with one that `first` stands for. Pure."""
    if not first or not modules:
        return modules
    begin = zlib.crc32(first.encode()) % len(modules)
    return modules[begin:] + modules[:begin]


def leave() -> None:
    """Let processes that are started from now on know nothing of it."""
    for name in (UNTIL, FIRST):
        os.environ.pop(name, None)


def from_environment() -> TimeBox | None:
    """The time box that the environment asks for, if any."""
    until, first = os.environ.get(UNTIL, ""), os.environ.get(FIRST, "")
    return TimeBox(float(until) if until else float("inf"), first) if until or first else None
