"""A virtual clock that calls scheduled actions. Actions of the same time are called in the order of scheduling."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock that jumps from one scheduled action to the next.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule `action` at `time`, or now if that has passed."""
        heapq.heappush(self._due, (max(time, self.now), next(self._count), action))

    def call_after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule `action` `seconds` from now."""
        self.call_at(self.now + seconds, action)

    def run_until(self, until: float) -> None:
        """Call all actions that are due up to and including `until`, then stop there."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until
