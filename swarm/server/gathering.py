"""How long an iteration should wait for more sessions to join it. Pure: the clock is handed in.

Steps that were computed together go to the next server one after the other, a fraction of a millisecond apart. An
iteration that began with the first of them would leave the others to a second one, which costs as much again, and
batches would fall apart from server to server. So while other sessions are known to be about, an idle server lets a
small share of an iteration's time pass before it begins.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

SHARE = 0.1
"""Of what an iteration takes lately: the most that can be lost by waiting."""

LONGEST = 0.002
"""Seconds; steps that were computed together arrive sooner than that."""

ABOUT = 2.0
"""Seconds since a session's last request within which the next one is expected."""


@dataclass
class Gathering:
    """Who is about, and what an iteration takes."""

    _seen: dict[Hashable, float] = field(default_factory=dict)
    _seconds: float = 0.0

    def came(self, session: Hashable, now: float) -> None:
        """A session wants a step."""
        self._seen.pop(session, None)
        self._seen[session] = now
        while (oldest := next(iter(self._seen))) is not session and now - self._seen[oldest] > ABOUT:
            del self._seen[oldest]

    def took(self, seconds: float) -> None:
        """An iteration of decode steps is over."""
        self._seconds = seconds

    @property
    def about(self) -> int:
        """Sessions that have come lately."""
        return len(self._seen)

    def patience(self, waiting: int) -> float:
        """Seconds to wait for others, while `waiting` sessions wait already."""
        return min(LONGEST, SHARE * self._seconds) if 0 < waiting < self.about else 0.0
