"""The virtual clock: what happens when. Things of the same time happen in the order in which they were asked for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Attributes:
    now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at `time`, or now if that is past."""
        heapq.heappush(self._due, (max(time, self.now), next(self._count), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` `seconds` from now."""
        self.at(self.now + seconds, action)

    def run(self, until: float) -> None:
        """Let everything happen that is due up to and including `until`."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until
