"""How much a peer has earned: by the time since it was first served, and by what was computed for it. Pure, but for a
clock that is handed in.

A new peer has no standing. Where there is room for all, that makes no difference. Where there is not, peers of standing
come first. Somebody who makes new identities has to serve their time with each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

ESTABLISHED_AFTER_S = 3600.0
"""Seconds after which a peer can have full standing."""

ESTABLISHED_TOKENS = 10_000
"""Tokens that have to be computed for it by then: a few conversations."""

NEW_PEER_SHARE = 0.125
"""Share of the cache that a peer without standing keeps if others want it."""

MAX_PEERS = 4096
"""Peers of full standing that are remembered, and as many others. Those that were not served for longest are forgotten
first, so that new peers push out new ones only."""


@dataclass(slots=True)
class _Record:
    since: float
    tokens: int = 0


def standing(age_s: float, tokens: int) -> float:
    """The standing of a peer that has been served for so long, with so many tokens: 0 to 1."""
    return max(0.0, min(1.0, age_s / ESTABLISHED_AFTER_S, tokens / ESTABLISHED_TOKENS))


class PeerStanding:
    """The standing of one server's peers.

    Args:
        now: clock in seconds.
        new_share: see `NEW_PEER_SHARE`.
        max_peers: see `MAX_PEERS`.
    """

    def __init__(self, now: Callable[[], float], new_share: float = NEW_PEER_SHARE, max_peers: int = MAX_PEERS) -> None:
        self._now = now
        self._new_share = new_share
        self._max_peers = max_peers
        self._new: OrderedDict[str, _Record] = OrderedDict()
        self._established: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._established)

    def __call__(self, peer: str) -> float:
        """Of one peer, 0 to 1."""
        if peer in self._established:
            return 1.0
        record = self._new.get(peer)
        return standing(self._now() - record.since, record.tokens) if record is not None else 0.0

    def kept_share(self, peer: str, full_share: float) -> float:
        """The share of the cache that a peer keeps if others want it, where one of full standing keeps `full_share`."""
        least = min(self._new_share, full_share)
        return least + (full_share - least) * self(peer)

    def note_served(self, peer: str, tokens: int) -> None:
        """So many tokens were computed for a peer."""
        if peer in self._established:
            self._established.move_to_end(peer)
            return
        record = self._new.setdefault(peer, _Record(self._now()))
        record.tokens += tokens
        self._new.move_to_end(peer)
        if standing(self._now() - record.since, record.tokens) >= 1:
            self._established[peer] = self._new.pop(peer)
        for table in (self._new, self._established):
            if len(table) > self._max_peers:
                table.popitem(last=False)

    def note_violation(self, peer: str) -> None:
        """A peer broke the protocol: it begins anew."""
        self._new.pop(peer, None)
        self._established.pop(peer, None)
