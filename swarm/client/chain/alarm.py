"""A timer that can be moved."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Alarm:
    """Calls a function at a time, on the clock of `time.perf_counter`.

    Attributes:
        time: when it rings; infinite if it does not.
    """

    def __init__(self) -> None:
        self.time = math.inf
        self._ring: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, at: float, ring: Callable[[], object]) -> None:
        """Call `ring` then, unless it is stopped before."""
        self._ring = ring
        self.move(at)

    def move(self, at: float) -> None:
        """Ring at another time, if it was started and not stopped."""
        if self._ring is None:
            return
        self.time = at
        if self._timer is not None:
            self._timer.cancel()
        wait = at - time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(wait, self._ring) if at < math.inf else None

    def stop(self) -> None:
        """Do not ring."""
        self._ring = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
