"""Which of the peers that may share a model's weights are asked: who lied, who has nothing, who failed lately. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swarm.errors import ProtocolViolation, RemoteError, TooManyDownloads, WeightsNotShared

RETRY_S = 2.0
"""After this time a peer that failed is asked again, and others are looked for."""

STALLED_S = 30.0
"""A peer that has sent nothing that it was asked for is given up after this time if there are others, which then get
its room and its chunks. A chunk takes 17 s on an uplink of 0.5 Mbit/s."""


class HolderChoice:
    """The peers that may be asked for weights, and what is known of them. All times are seconds of one clock.

    Args:
        liars: peers that have sent wrong bytes, which are not asked; those that do are added.
    """

    def __init__(self, liars: set[str]) -> None:
        self._liars = liars
        self._known: list[str] = []
        self._useless: set[str] = set()
        """Peers that share none of the parts, or none that is still missing, or not this model."""
        self._retry_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._asked: set[str] = set()
        """Peers that were asked since something came."""
        self._reasons: dict[str, str] = {}

    @property
    def possible(self) -> list[str]:
        """Those that have anything to give, in the order in which they were found."""
        return [one for one in self._known if one not in self._liars and one not in self._useless]

    @property
    def told(self) -> str:
        """Why peers gave nothing, in their words."""
        return "; ".join(dict.fromkeys(self._reasons.values()))

    def find(self, holders: Iterable[str]) -> None:
        """Note which peers there are, best first."""
        self._known = list(dict.fromkeys(holders))

    def to_ask(self, now: float) -> list[str]:
        """Those that can be asked now. Those that failed least come first, so that others get their turn."""
        ready = [one for one in self.possible if self._retry_at.get(one, now) <= now]
        return sorted(ready, key=lambda one: self._failures[one])

    def note_asked(self, holder: str) -> bool:
        """A peer is asked. Returns whether it is the first time since something came."""
        is_first = holder not in self._asked
        self._asked.add(holder)
        return is_first

    def note_progress(self) -> None:
        """Something came."""
        self._asked.clear()

    def note_end(self, holder: str) -> None:
        """A peer has given what it had."""
        self._useless.add(holder)

    def note_error(self, holder: str, error: RemoteError, now: float, is_stalled: bool = False) -> None:
        """A peer failed, refused, or lied."""
        self._reasons[holder] = str(error)
        if isinstance(error, WeightsNotShared):
            self._useless.add(holder)
        elif isinstance(error, ProtocolViolation):
            self._liars.add(holder)
        else:
            busy = RETRY_S * (2 if isinstance(error, TooManyDownloads) else 1)
            self._retry_at[holder] = now + (STALLED_S if is_stalled else busy)
            self._failures[holder] += 1

    def stalled(self, silent_s: Mapping[str, float]) -> Sequence[str]:
        """Of the peers that are asked now, those that are to be given up for others.

        Args:
            silent_s: for how many seconds each has not answered, though something is asked.
        """
        silent = [one for one, seconds in silent_s.items() if seconds > STALLED_S]
        untried = [one for one in self.possible if one not in silent_s and one not in self._retry_at]
        return silent if untried or len(silent) < len(silent_s) else ()
