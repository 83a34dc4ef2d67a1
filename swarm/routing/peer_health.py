"""What a client remembers of servers that failed, lied or were slow. Pure: the caller passes the time in.

Failures are temporary bans with exponential backoff. A lie about what passed between two servers, of which the client
cannot tell whose it was, keeps these two apart. How long steps take is compared with what the server announces.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field

MAX_BAN_S = 1800.0
"""Upper bound on a ban, where doubling ends."""

FORGET_AFTER_S = 3600.0
"""Seconds after which what a client knows of a peer is forgotten: since its last ban ended, or since its last step."""

STRIKE_PENALTY_S = 0.1
"""Cost added to a route for each strike of a peer on it: about one round trip, so that a peer that failed is chosen
again only where it is clearly better."""

MAX_STRIKES = 16
"""Maximum number of counted strikes: by then every ban has reached `MAX_BAN_S`, and the penalty stays finite."""

MAX_KEPT_REASONS = 8

RETRY_AFTER_S = 2.0
"""Where no other server holds a block, one at home that could not be reached, or was silent, is tried again after this
time: its router may have been away for a moment."""

DISTRUST_S = 1800.0
"""How long two servers are kept apart."""

MAX_PARTNERS = 2
"""A server that was caught with this many others is no longer linked at all. An honest one that liars frame loses no
more than its links: this client passes its outputs on itself."""

PARTNER_PENALTY_S = 0.1
"""Cost added to a route for each server that a peer was caught with."""

KEPT_STEPS = 8
"""Newest steps of a server, whose median counts: one that stalls for a moment is not slow."""

HALF_LIFE_S = 300.0
"""Seconds without a new step after which an overrun counts half."""

MAX_OVERRUN_S = 10.0
"""Seconds for each block that a server is charged with at most."""


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
        that they were used, nothing came from them."""
        return frozenset(
            peer_id
            for peer_id, record in self._records.items()
            if now < record.banned_until
            and record.reasons[-1] in (PeerFailure.UNREACHABLE, PeerFailure.TIMED_OUT)
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


class LinkTrust:
    """This client's record of links where one side lied. All times are seconds of one clock, passed in by the caller.

    Args:
        max_links: links that are remembered; the oldest is forgotten first.
    """

    def __init__(self, max_links: int = 4096) -> None:
        self._max_links = max_links
        self._until: OrderedDict[frozenset[str], float] = OrderedDict()

    def distrust(self, one: str, other: str, now: float) -> None:
        """One of two servers lied about what passed between them."""
        pair = frozenset((one, other))
        self._until.pop(pair, None)
        self._until[pair] = now + DISTRUST_S
        while len(self._until) > self._max_links:
            self._until.popitem(last=False)

    def trusts(self, one: str, other: str, now: float) -> bool:
        """Whether one of two servers may push to the other."""
        if not self._until:
            return True
        caught = self._partners(now)
        return other not in caught.get(one, ()) and all(
            len(caught.get(peer, ())) < MAX_PARTNERS for peer in (one, other)
        )

    def penalties(self, now: float) -> dict[str, float]:
        """Peer id -> seconds to add to the cost of using the peer."""
        return {peer: len(partners) * PARTNER_PENALTY_S for peer, partners in self._partners(now).items()}

    def _partners(self, now: float) -> dict[str, set[str]]:
        """Peer id -> the servers that it was caught with."""
        found: dict[str, set[str]] = {}
        for pair, until in self._until.items():
            if now < until:
                for peer in pair:
                    found.setdefault(peer, set()).update(pair - {peer})
        return found


@dataclass
class _Overruns:
    when: float
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    @property
    def median(self) -> float:
        return statistics.median(self.steps)


class MeasuredOverruns:
    """Seconds that servers take for each block beyond what they announce. Times are seconds of the caller's clock.

    Args:
        max_peers: number of peers that are kept; the one measured longest ago is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._peers: OrderedDict[str, _Overruns] = OrderedDict()  # the one measured longest ago first

    def __len__(self) -> int:
        return len(self._peers)

    def record(self, peer_id: str, seconds: float, now: float, anew: bool = False) -> None:
        """A step took so many seconds a block longer than announced. Raises `ValueError` if they are not finite.

        Args:
            anew: forget the steps before this one.
        """
        if not math.isfinite(seconds):
            raise ValueError(f"{seconds} is not a valid overrun: expected a finite number of seconds")
        known = self._peers.pop(peer_id, None)
        if known is None or anew:
            known = _Overruns(now)
        known.when = now
        known.steps.append(min(max(seconds, 0.0), MAX_OVERRUN_S))
        self._peers[peer_id] = known
        while len(self._peers) > self._max_peers or now - next(iter(self._peers.values())).when > FORGET_AFTER_S:
            self._peers.popitem(last=False)

    def charges(self, now: float) -> dict[str, float]:
        """Peer id -> seconds >= 0 for each block that the peer is charged with."""
        medians = {
            peer_id: known.median for peer_id, known in self._peers.items() if now - known.when <= FORGET_AFTER_S
        }
        least, second = (*sorted(medians.values())[:2], 0.0, 0.0)[:2] if len(medians) > 1 else (0.0, 0.0)
        charged = {}
        for peer_id, median in medians.items():
            age = max(0.0, now - self._peers[peer_id].when)
            common = second if median == least else least
            charged[peer_id] = max(0.0, median - common) * 0.5 ** (age / HALF_LIFE_S)
        return charged
