"""Which owners of records a peer has known for long, and whose records it keeps when there is no room for all.

Identities cost nothing, so ten thousand new ones must not displace those that were there before. A peer keeps first the
owners that have served it, then long-standing ones, the longest-standing first. A quarter of the places is reserved for
new owners. Among these a lottery decides whose tickets each peer keeps secret, so that an owner that loses at one peer
may win at the next.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

ESTABLISHED_AFTER_S = 600.0
"""An owner that was first seen this long ago is long-standing."""

FORGET_AFTER_S = 3600.0
"""An owner that was not seen for this long is new again. A service counts for this long."""

MAX_REMEMBERED = 16384
SENIOR_SHARE = 0.75
"""Share of the places that long-standing owners may take from new ones."""


@dataclass(slots=True)
class _Memory:
    first_seen: float
    last_seen: float
    served_at: float = float("-inf")


class Standing:
    """What one peer remembers of the owners of records. All times are seconds of one clock, passed in by the caller.

    Args:
        salt: this peer's secret, from which the tickets of its lottery are made.
        max_remembered: owners that are remembered.
    """

    def __init__(self, salt: bytes, max_remembered: int = MAX_REMEMBERED) -> None:
        self._salt = salt
        self._max_remembered = max_remembered
        self._known: OrderedDict[str, _Memory] = OrderedDict()  # the one seen longest ago first

    def __len__(self) -> int:
        return len(self._known)

    def note_seen(self, owner: str, now: float) -> None:
        """The owner has a valid record."""
        memory = self._known.get(owner)
        if memory is None or now - memory.last_seen > FORGET_AFTER_S:
            memory = self._known[owner] = _Memory(now, now)
        memory.last_seen = max(now, memory.last_seen)
        self._known.move_to_end(owner)
        self._forget(now)

    def note_served(self, owner: str, now: float) -> None:
        """The owner has done what this peer asked for. Nothing is kept for an owner that was never seen."""
        if (memory := self._known.get(owner)) is not None:
            memory.served_at = now

    def note_failed(self, owner: str) -> None:
        """The owner has failed this peer: its earlier services count no longer."""
        if (memory := self._known.get(owner)) is not None:
            memory.served_at = float("-inf")

    def is_established(self, owner: str, now: float) -> bool:
        """Whether the owner is no newcomer: it has served this peer, or has long been there."""
        return self._rank(owner, now)[0] < 2

    def select(
        self, owners: Iterable[str], limit: int, now: float, groups: Mapping[str, str] | None = None
    ) -> list[str]:
        """The owners that are kept, the best first.

        Args:
            limit: places.
            groups: owner -> the network that it is in. Networks get the places of new owners in turn, so that many
                owners in one network compete with each other, not with those elsewhere.
        """
        ranked = sorted((self._rank(owner, now), owner) for owner in set(owners))
        served = sum(rank[0] == 0 for rank, _ in ranked)
        senior = sum(rank[0] <= 1 for rank, _ in ranked)
        protected = min(max(served, min(senior, int(limit * SENIOR_SHARE))), limit)
        rest = self._by_lottery([owner for _, owner in ranked[protected:]], groups or {})
        return [owner for _, owner in ranked[:protected]] + rest[: limit - protected]

    def _rank(self, owner: str, now: float) -> tuple[int, float]:
        memory = self._known.get(owner)
        if memory is None or now - memory.last_seen > FORGET_AFTER_S:
            return 2, 0.0
        if now - memory.served_at <= FORGET_AFTER_S:
            return 0, memory.first_seen
        return (1, memory.first_seen) if now - memory.first_seen >= ESTABLISHED_AFTER_S else (2, 0.0)

    def _by_lottery(self, owners: list[str], groups: Mapping[str, str]) -> list[str]:
        places: dict[str, int] = {}
        order: list[tuple[int, bytes, str]] = []
        for ticket, owner in sorted((self._ticket(owner), owner) for owner in owners):
            group = groups.get(owner, "")
            places[group] = places.get(group, 0) + 1
            order.append((places[group], ticket, owner))
        return [owner for _, _, owner in sorted(order)]

    def _ticket(self, owner: str) -> bytes:
        return _ticket(self._salt, owner)

    def _forget(self, now: float) -> None:
        """Forget owners not seen for long, and if there are still too many, the newest: they lose least."""
        while self._known and now - next(iter(self._known.values())).last_seen > FORGET_AFTER_S:
            self._known.popitem(last=False)
        if len(self._known) > self._max_remembered:
            kept = set(self.select(self._known, self._max_remembered * 7 // 8, now))
            self._known = OrderedDict((owner, memory) for owner, memory in self._known.items() if owner in kept)


@lru_cache(maxsize=MAX_REMEMBERED)
def _ticket(salt: bytes, owner: str) -> bytes:
    return hashlib.blake2b(owner.encode(), key=salt, digest_size=8).digest()
