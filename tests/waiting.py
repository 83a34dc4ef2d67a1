"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 300.0
"""For what never happens: on a busy machine everything else may take many times as long as on a quiet one."""


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Ask again and again until `condition` returns something true; fails the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s:.0f} s"
        time.sleep(0.05)
