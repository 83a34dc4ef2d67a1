"""Temporary bans of servers that failed this client: exponential backoff with typed reasons."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass, field

MAX_BAN_S = 1800.0
"""Upper bound on a ban, where doubling ends."""

FORGET_AFTER_S = 3600.0
"""Time after the end of a ban when all failures of the peer are forgotten, even if it was not used since."""

STRIKE_PENALTY_S = 0.1
"""Cost added to a route for each strike of a peer on it: about one round trip, so that a peer that failed is chosen
again only where it is clearly better."""

MAX_STRIKES = 16
"""Maximum number of counted strikes: by then every ban has reached `MAX_BAN_S`, and the penalty stays finite."""

MAX_KEPT_REASONS = 8

RETRY_AFTER_S = 2.0
"""Where no other server holds a block, one at home that could not be reached is tried again after this time: its router
may have been away for a moment."""


class PeerFailure(enum.Enum):
    """Why a peer could not be used. Each reason has its own first ban."""

    UNREACHABLE = "could not be reached"
    TIMED_OUT = "did not answer in time"
    WRONG_ANSWER = "gave a wrong answer"
    REFUSED = "refused the request"
    FAULT = "reported a fault of its own"
    CACHE_FULL = "has no room in its cache"
    CLOSING = "is closing or moving"
    SUSPECTED = "gave an answer with NaN or infinity, or caused one"

    @property
    def ban_seconds(self) -> float:
        """How long the peer is banned after the first failure of this kind."""
        return _FIRST_BAN_S[self]

    @property
    def counts_as_strike(self) -> bool:
        """False if the peer did right to refuse: then the ban is short and does not grow."""
        return self not in (PeerFailure.CACHE_FULL, PeerFailure.CLOSING)


_FIRST_BAN_S = {
    PeerFailure.UNREACHABLE: 15.0,
    PeerFailure.TIMED_OUT: 15.0,
    PeerFailure.WRONG_ANSWER: 300.0,  # any peer may lose a connection, but none should give a wrong answer
    PeerFailure.REFUSED: 30.0,
    PeerFailure.FAULT: 30.0,
    PeerFailure.CACHE_FULL: 5.0,
    PeerFailure.CLOSING: 10.0,
    PeerFailure.SUSPECTED: 10.0,
}


@dataclass
class _PeerRecord:
    """Failures of one peer; times are those of the caller's clock."""

    strikes: int = 0
    banned_until: float = float("-inf")
    same_strike_until: float = float("-inf")
    ban_seconds: float = 0.0
    failed_at: float = float("-inf")
    reasons: deque[PeerFailure] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_REASONS))


class PeerHealth:
    """This client's record of its peers' failures. All times are seconds of one clock, passed in by the caller.

    A failure bans the peer for the first ban of its reason, doubled with each strike that the peer already has, up to
    `MAX_BAN_S`. Another failure never shortens a ban. Failures during a ban belong to requests that began before it:
    a client with fifty sessions sees one fault fifty times, and that counts as one strike. A success clears the record
    once the peer has been unbanned for as long as its last ban lasted; an earlier success says little, since a bad
    peer answers correctly most of the time.

    Args:
        max_peers: number of peers that are remembered; the one whose last failure is oldest is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self.max_peers = max_peers
        self._records: OrderedDict[str, _PeerRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def record_failure(self, peer_id: str, reason: PeerFailure, now: float) -> float:
        """Record a failure. Returns the time at which the ban ends."""
        record = self._records.pop(peer_id, None)
        if record is None or now >= record.banned_until + FORGET_AFTER_S:
            record = _PeerRecord()
        seconds, is_new = reason.ban_seconds, True
        if reason.counts_as_strike:
            is_new = now >= record.same_strike_until
            record.strikes = min(record.strikes + is_new, MAX_STRIKES)
            seconds = min(seconds * 2 ** (record.strikes - 1), MAX_BAN_S)
            record.same_strike_until = max(record.same_strike_until, now + seconds)
        if is_new or reason not in record.reasons:
            record.reasons.append(reason)
        if now + seconds >= record.banned_until:
            record.banned_until, record.ban_seconds = now + seconds, seconds
        record.failed_at = now
        self._records[peer_id] = record
        while len(self._records) > self.max_peers:
            self._records.popitem(last=False)
        return record.banned_until

    def record_success(self, peer_id: str, now: float) -> None:
        """Record that the peer did what was requested."""
        record = self._records.get(peer_id)
        if record is not None and now >= record.banned_until + record.ban_seconds:
            del self._records[peer_id]

    def banned_until(self, peer_id: str, now: float) -> float | None:
        """The time at which the ban ends; None if the peer is not banned."""
        record = self._records.get(peer_id)
        return record.banned_until if record is not None and now < record.banned_until else None

    def is_banned(self, peer_id: str, now: float) -> bool:
        return self.banned_until(peer_id, now) is not None

    def banned_peers(self, now: float) -> frozenset[str]:
        """Ids of the peers that are banned now."""
        return frozenset(peer_id for peer_id, record in self._records.items() if now < record.banned_until)

    def worth_a_try(self, now: float) -> frozenset[str]:
        """Ids of the banned peers that may be tried before their ban ends, if there is no other way: the last time
        that they were used, they could not be reached."""
        return frozenset(
            peer_id
            for peer_id, record in self._records.items()
            if now < record.banned_until
            and record.reasons[-1] is PeerFailure.UNREACHABLE
            and now - record.failed_at >= RETRY_AFTER_S
        )

    def penalties(self, now: float) -> dict[str, float]:
        """Peer id -> seconds to add to the cost of using the peer, for peers with strikes."""
        return {
            peer_id: record.strikes * STRIKE_PENALTY_S
            for peer_id, record in self._records.items()
            if record.strikes and now < record.banned_until + FORGET_AFTER_S
        }

    def gave_wrong_answer(self, peer_id: str, now: float) -> bool:
        """Whether the peer is banned now, and for its last answer."""
        wrong = (PeerFailure.WRONG_ANSWER, PeerFailure.SUSPECTED)
        return self.is_banned(peer_id, now) and self.reasons(peer_id)[-1] in wrong

    def reasons(self, peer_id: str) -> tuple[PeerFailure, ...]:
        """The latest failures of the peer, oldest first."""
        record = self._records.get(peer_id)
        return tuple(record.reasons) if record is not None else ()
