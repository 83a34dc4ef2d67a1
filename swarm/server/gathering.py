"""How long an iteration should wait for more sessions to join it. Pure: what happens is told, the answer is seconds.

Reading the weights costs the same for one row as for several. Steps that were computed together go on to the next
server, and come back from their clients, a little apart; an iteration that began with the first of them would leave the
others to a second one, which costs as much again, and batches would fall apart from server to server. So sessions that
were computed together are waited for, for a part of an iteration's time: less by half for each time that would have
been in vain, and more again when they do come close together.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

PART = 0.5
"""Of what an iteration takes, at most. Who comes within half of it wins more than those that wait for it lose."""

LONGEST = 0.1
"""Seconds. Slow servers compute for seconds; nobody comes that much later than the others."""

LEAST = 1 / 64
"""A trust below this is none."""

KNOWN = 4096
"""Sessions that are remembered."""


@dataclass
class Gathering:
    """Who was computed together lately, and what an iteration takes."""

    _company: dict[Hashable, frozenset[Hashable]] = field(default_factory=dict)
    _trust: dict[Hashable, float] = field(default_factory=dict)
    _seconds: float = 0.0
    _awaited: frozenset[Hashable] = frozenset()
    _until: float = 0.0

    def missing(self, waiting: Collection[Hashable]) -> frozenset[Hashable]:
        """Sessions that were computed with one of those that wait, and are not here yet."""
        company = (self._company.get(session, frozenset()) for session in waiting)
        return frozenset().union(*company).difference(waiting)

    def patience(self, missing: frozenset[Hashable], now: float) -> float:
        """Seconds to wait for them from now on. Whether they come in time is noted in any case."""
        longest = min(LONGEST, PART * self._seconds)
        self._lose(self._awaited - missing)
        self._awaited, self._until = missing, now + longest
        trust = max((self._trust.get(session, 1.0) for session in missing), default=0.0)
        return longest * trust if trust >= LEAST else 0.0

    def came(self, session: Hashable, now: float) -> None:
        """A session wants a step."""
        if session in self._awaited:
            self._awaited -= {session}
            if now <= self._until:
                self._trust[session] = min(1.0, 2 * self._trust.get(session, 1.0))
            else:
                self._lose([session])

    def _lose(self, sessions: Iterable[Hashable]) -> None:
        """They did not come in time."""
        for session in sessions:
            self._trust[session] = max(LEAST / 2, self._trust.get(session, 1.0) / 2)
        while len(self._trust) > KNOWN:
            del self._trust[next(iter(self._trust))]

    def computed(self, sessions: Collection[Hashable], seconds: float) -> None:
        """An iteration of short requests is over."""
        self._seconds = seconds
        company = frozenset(sessions)
        for session in company:
            self._company.pop(session, None)
            self._company[session] = company
        while len(self._company) > KNOWN:
            del self._company[next(iter(self._company))]
