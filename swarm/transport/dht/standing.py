"""Which owners of records a peer knows for long, and whom it keeps where there is not room for all.

Identities cost nothing, so whoever makes ten thousand of them must not push out those that were there before: a peer
keeps first the owners that have served it, then those that have long been there, the oldest first. A quarter of the
places is left to newcomers. Among them a lottery decides, whose tickets are secret to each peer, so that an owner that
loses at one peer may win at the next.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ESTABLISHED_AFTER_S = 600.0
"""An owner that has been there for so long is no newcomer."""

FORGET_AFTER_S = 3600.0
"""An owner that has not been seen for so long is a newcomer again, and so is a service that long ago no merit."""

MAX_REMEMBERED = 16384
SENIOR_SHARE = 0.75
"""Share of the places that long-standing owners may take from newcomers."""


@dataclass(slots=True)
class _Memory:
    first_seen: float
    last_seen: float
    served_at: float = float("-inf")


class Standing:
    """What one peer remembers of the owners of records. All times are seconds of one clock, passed in by the caller.

    Args:
        salt: secret of this peer, which makes the tickets of its lottery.
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
        """The owner has done what this peer asked for. Who was never seen has no record to be kept."""
        if (memory := self._known.get(owner)) is not None:
            memory.served_at = now

    def note_failed(self, owner: str) -> None:
        """The owner has failed this peer: what it did before counts no more."""
        if (memory := self._known.get(owner)) is not None:
            memory.served_at = float("-inf")

    def select(
        self, owners: Iterable[str], limit: int, now: float, groups: Mapping[str, str] | None = None
    ) -> list[str]:
        """Those of the owners that are kept, the best first.

        Args:
            limit: places.
            groups: owner -> the network that it is in. Networks get newcomers' places in turn, so that many owners in
                one network compete with each other, not with those elsewhere.
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
        return hashlib.blake2b(owner.encode(), key=self._salt, digest_size=8).digest()

    def _forget(self, now: float) -> None:
        """Forget those not seen for long, and if there are still too many, the youngest: they lose least."""
        while self._known and now - next(iter(self._known.values())).last_seen > FORGET_AFTER_S:
            self._known.popitem(last=False)
        if len(self._known) > self._max_remembered:
            kept = set(self.select(self._known, self._max_remembered * 7 // 8, now))
            self._known = OrderedDict((owner, memory) for owner, memory in self._known.items() if owner in kept)
