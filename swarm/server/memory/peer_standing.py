"""A peer's standing: what it has earned by being served for some time, and by what was computed for it. Pure, but for a
clock that is handed in.

A new peer has no standing. As long as there is room for all, that makes no difference; then peers of standing come
first. An attacker with many identities has to earn the standing of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

ESTABLISHED_AFTER_S = 3600.0
"""Seconds after which a peer can have full standing."""

ESTABLISHED_TOKENS = 10_000
"""Tokens that must have been computed for it by then: a few conversations."""

NEW_PEER_SHARE = 0.125
"""Share of the cache that a peer without standing keeps when others need cache."""

MAX_PEERS = 4096
"""Peers of full standing that are remembered, and as many others. In each table the one served longest ago is forgotten
first, so that new peers displace only new ones."""


@dataclass(slots=True)
class _Record:
    since: float
    tokens: int = 0


def standing(age_s: float, tokens: int) -> float:
    """The standing, 0 to 1, of a peer that was first served `age_s` seconds ago and had `tokens` computed since."""
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
        """The standing of one peer, 0 to 1."""
        if peer in self._established:
            return 1.0
        record = self._new.get(peer)
        return standing(self._now() - record.since, record.tokens) if record is not None else 0.0

    def kept_share(self, peer: str, full_share: float) -> float:
        """The share of the cache that a peer keeps when others need cache; at full standing it is `full_share`."""
        least = min(self._new_share, full_share)
        return least + (full_share - least) * self(peer)

    def note_served(self, peer: str, tokens: int) -> None:
        """This many tokens were computed for a peer."""
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
        """A peer broke the protocol: it starts over without standing."""
        self._new.pop(peer, None)
        self._established.pop(peer, None)
