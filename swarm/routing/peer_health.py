"""Which servers to leave alone for a while, after they failed this client. Exponential back-off with typed reasons."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

LONGEST_BAN = 1800.0
"""Seconds of the longest ban; doubling ends here."""

FORGET = 3600.0
"""Seconds after the end of a ban when the peer is as good as new, even if it was not used since."""

STRIKE_PENALTY = 0.1
"""Seconds that a route through a peer is taken to last longer for each strike it still has: one more round trip, so
that a peer that failed is taken again only where it is clearly better."""

MAX_STRIKES = 16
"""Strikes that are counted at most: by then every ban has reached `LONGEST_BAN`, and the penalty stays finite."""

MAX_REASONS = 8


class PeerFailure(enum.Enum):
    """Why a peer was of no use. Each comes with the seconds of its first ban."""

    UNREACHABLE = "could not be reached"
    TIMED_OUT = "did not answer in time"
    WRONG_ANSWER = "gave a wrong answer"
    REFUSED = "refused the request"
    FAULT = "reported a fault of its own"
    CACHE_FULL = "has no room in its cache"
    CLOSING = "is closing or moving"

    @property
    def seconds(self) -> float:
        """How long the peer is avoided after the first failure of this kind."""
        return _BASE[self]

    @property
    def is_blame(self) -> bool:
        """False if the peer behaved well in saying so: it is avoided for a short while, always the same."""
        return self not in (PeerFailure.CACHE_FULL, PeerFailure.CLOSING)


_BASE = {
    PeerFailure.UNREACHABLE: 15.0,
    PeerFailure.TIMED_OUT: 15.0,
    PeerFailure.WRONG_ANSWER: 300.0,  # a lost connection happens to everybody, a wrong answer does not
    PeerFailure.REFUSED: 30.0,
    PeerFailure.FAULT: 30.0,
    PeerFailure.CACHE_FULL: 5.0,
    PeerFailure.CLOSING: 10.0,
}


@dataclass
class _PeerRecord:
    strikes: int = 0
    until: float = float("-inf")
    blamed_until: float = float("-inf")
    lasted: float = 0.0
    reasons: deque[PeerFailure] = field(default_factory=lambda: deque(maxlen=MAX_REASONS))


class PeerHealth:
    """What this client remembers of its peers' failures. All times are seconds of one clock that the caller reads.

    A failure bans the peer for the base seconds of its reason, doubled with each strike it has already, up to
    `LONGEST_BAN`. A ban is never shortened by another failure. What fails while the peer is banned began before: a
    client with fifty sessions sees one fault fifty times, and that is one strike. A success forgives all once the peer
    has been free for as long as its last ban was; one before that says little, since a bad peer answers rightly most
    of the time.

    Args:
        max_peers: how many peers are remembered; the one whose last failure is oldest is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self.max_peers = max_peers
        self._records: OrderedDict[str, _PeerRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def failed(self, peer_id: str, reason: PeerFailure, now: float) -> float:
        """Note a failure. Returns the time until when the peer is banned."""
        record = self._records.pop(peer_id, None)
        if record is None or now >= record.until + FORGET:
            record = _PeerRecord()
        seconds, is_new = reason.seconds, True
        if reason.is_blame:
            is_new = now >= record.blamed_until
            record.strikes = min(record.strikes + is_new, MAX_STRIKES)
            seconds = min(seconds * 2 ** (record.strikes - 1), LONGEST_BAN)
            record.blamed_until = max(record.blamed_until, now + seconds)
        if is_new or reason not in record.reasons:
            record.reasons.append(reason)
        if now + seconds >= record.until:
            record.until, record.lasted = now + seconds, seconds
        self._records[peer_id] = record
        while len(self._records) > self.max_peers:
            self._records.popitem(last=False)
        return record.until

    def succeeded(self, peer_id: str, now: float) -> None:
        """Note that the peer did what it was asked to."""
        record = self._records.get(peer_id)
        if record is not None and now >= record.until + record.lasted:
            del self._records[peer_id]

    def banned_until(self, peer_id: str, now: float) -> float | None:
        """When the ban ends; None if there is none at present."""
        record = self._records.get(peer_id)
        return record.until if record is not None and now < record.until else None

    def banned(self, peer_id: str, now: float) -> bool:
        return self.banned_until(peer_id, now) is not None

    def all_banned(self, now: float) -> frozenset[str]:
        """Peer ids that are banned at present."""
        return frozenset(peer_id for peer_id, record in self._records.items() if now < record.until)

    def penalties(self, now: float) -> dict[str, float]:
        """Peer id -> seconds to add to the cost of using the peer, for those with strikes that are not forgiven yet."""
        return {
            peer_id: record.strikes * STRIKE_PENALTY
            for peer_id, record in self._records.items()
            if record.strikes and now < record.until + FORGET
        }

    def reasons(self, peer_id: str) -> tuple[PeerFailure, ...]:
        """The latest failures of the peer, oldest first."""
        record = self._records.get(peer_id)
        return tuple(record.reasons) if record is not None else ()
