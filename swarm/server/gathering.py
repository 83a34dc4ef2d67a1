"""How long an iteration should wait for more sessions to join it. Pure: what happens is told, the answer is seconds.

Reading the weights costs the same for one row as for several. A server that is busy most of the time computes more
tokens if it lets some sessions come together first; from then on they travel together from server to server. So an
iteration that has fewer than half of the sessions that are about waits for more, for a part of what it takes. A server
that has time to spare, or a session or two, starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

PART = 0.5
"""Of what an iteration takes, at most. Who comes within half of it wins more than those that wait for it lose."""

LONGEST = 0.1
"""Seconds. Slow servers compute for seconds; who is together comes sooner than that."""

BUSY = 0.4
"""Share of the time that a server computes, from which on it is short of it."""

ABOUT = 2.0
"""Seconds since a session's last request within which the next one is expected."""

MEMORY = 1.0
"""Seconds in which what was computed loses all but 1/e of its weight."""


@dataclass
class Gathering:
    """Who is about, how busy the server is, and what an iteration takes."""

    _seen: dict[Hashable, float] = field(default_factory=dict)
    _iteration: float = 0.0
    _busy: float = 0.0
    _when: float = -math.inf

    def came(self, session: Hashable, now: float) -> None:
        """A session wants a step."""
        self._seen.pop(session, None)
        self._seen[session] = now
        while now - self._seen[oldest := next(iter(self._seen))] > ABOUT:
            del self._seen[oldest]

    def computed(self, seconds: float, now: float) -> None:
        """An iteration of short requests is over."""
        self._iteration = seconds
        self._busy = self._busy_at(now) + seconds
        self._when = now

    @property
    def enough(self) -> int:
        """Sessions with which an iteration starts at once."""
        return len(self._seen) // 2

    def patience(self, waiting: int, now: float) -> float:
        """Seconds to wait for others, while `waiting` sessions wait already."""
        if waiting >= self.enough or self._busy_at(now) < BUSY * MEMORY:
            return 0.0
        return min(LONGEST, PART * self._iteration)

    def _busy_at(self, now: float) -> float:
        """Seconds of computing, each weighted by its age: `MEMORY` for a server that never rests."""
        return self._busy * math.exp(-max(0.0, now - self._when) / MEMORY) if self._busy else 0.0
