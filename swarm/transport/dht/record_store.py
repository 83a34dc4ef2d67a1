"""The records that a node of the DHT keeps for the swarm, within limits that no stranger can exhaust.

There is at most one record for a key and owner, and the one that expires later wins. An owner has few records; beyond
them, its own records give way. A key has few enough that all of them fit into one answer, and the node has a limit too;
beyond these, a few records are drawn, and the one whose owner has the least standing gives way (`Standing`). Records
are counted, not weighed: their size is bounded, and by weight a few large records could take the room of many small
ones.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.transport.dht.records import MAX_RECORD_BYTES, Record, is_expired
from swarm.transport.dht.standing import Standing


@dataclass(frozen=True)
class StoreLimits:
    """How much a node keeps.

    Attributes:
        owner_records: records of one owner. A server has its announcement, its model record, and for a while the
            announcements of blocks that it has left.
        key_records: under one key.
        records: in all, of at most `MAX_RECORD_BYTES` and about one more kilobyte each.
    """

    owner_records: int = 8
    key_records: int = 256
    records: int = 4096


DRAWN = 256
"""Owners among whom is chosen who gives way: all of a key, and of the node's enough to know a newcomer when there is
one. To choose among 4096 for each record takes a hundred times as long as to verify it."""

Address = tuple[bytes, str]
"""Key and owner of a record."""


@dataclass(frozen=True, slots=True)
class _Kept:
    record: Record
    group: str


class RecordStore:
    """Records by key and owner. All times are Unix times, passed in by the caller.

    Args:
        standing: remembers the owners.
        limits: how much is kept.
    """

    def __init__(self, standing: Standing, limits: StoreLimits | None = None) -> None:
        self._standing = standing
        self._limits = limits or StoreLimits()
        self._by_key: dict[bytes, dict[str, _Kept]] = {}
        self._by_owner: dict[str, set[bytes]] = {}
        self._random = random.Random()
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of subkeys and values."""
        return self._bytes

    def store(self, record: Record, owner: str, now: float, group: str = "") -> bool:
        """Keep a valid record of `owner`. False if it is over, if a newer one is known, or if there is no room for it.

        Args:
            group: the network that the owner is in; see `Standing.select`.
        """
        known = self._by_key.get(record.key, {}).get(owner)
        if is_expired(record.expires, now) or record.size_bytes > MAX_RECORD_BYTES:
            return False
        if known is not None and known.record.expires >= record.expires:
            return False
        self._put(record, owner, group)
        self._limit_owner(owner, record.key)
        self._limit_key(record.key, owner, now)
        self._limit_all(owner, now)
        is_kept = owner in self._by_key.get(record.key, {})
        if is_kept:
            self._standing.note_seen(owner, now)
        return is_kept

    def find(self, key: bytes, now: float) -> list[Record]:
        """The records under a key, those that should be read first at the front."""
        self._drop_expired(key, now)
        kept = self._by_key.get(key, {})
        return [kept[owner].record for owner in self._ranked(kept, now)]

    def remove_expired(self, now: float) -> None:
        """Drop all records that are over."""
        for key in list(self._by_key):
            self._drop_expired(key, now)

    def _put(self, record: Record, owner: str, group: str) -> None:
        self._drop(record.key, owner)
        self._by_key.setdefault(record.key, {})[owner] = _Kept(record, group)
        self._by_owner.setdefault(owner, set()).add(record.key)
        self._bytes += record.size_bytes
        self._count += 1

    def _drop(self, key: bytes, owner: str) -> None:
        kept = self._by_key.get(key, {}).pop(owner, None)
        if kept is None:
            return
        self._bytes -= kept.record.size_bytes
        self._count -= 1
        if not self._by_key[key]:
            del self._by_key[key]
        self._by_owner[owner].discard(key)
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _drop_expired(self, key: bytes, now: float) -> None:
        kept = self._by_key.get(key, {})
        for owner in [owner for owner, one in kept.items() if is_expired(one.record.expires, now)]:
            self._drop(key, owner)

    def _limit_owner(self, owner: str, newest: bytes) -> None:
        """Of an owner with too many records, drop the one that expires first, but not what it has just stored."""
        keys = self._by_owner[owner]
        while len(keys) > self._limits.owner_records:
            first = min(keys - {newest}, key=lambda key: (self._by_key[key][owner].record.expires, key))
            self._drop(first, owner)

    def _limit_key(self, key: bytes, newest: str, now: float) -> None:
        kept = self._by_key[key]
        if len(kept) > self._limits.key_records:
            self._drop_expired(key, now)
        if len(kept) > self._limits.key_records:
            drawn = self._draw(kept, newest)
            self._drop(key, self._last(drawn, {owner: kept[owner].group for owner in drawn}, now))

    def _limit_all(self, newest: str, now: float) -> None:
        if self._count > self._limits.records:
            drawn = self._draw(self._by_owner, newest)
            held = [(key, owner) for owner in drawn for key in self._by_owner[owner]]
            over = [one for one in held if is_expired(self._by_key[one[0]][one[1]].record.expires, now)]
            if not over:
                last = self._last(drawn, {owner: self._by_key[key][owner].group for key, owner in held}, now)
                over = [one for one in held if one[1] == last]
            for key, owner in over:
                self._drop(key, owner)

    def _draw(self, owners: Collection[str], newest: str) -> set[str]:
        """Some of the owners, and whose record was stored just now."""
        drawn = self._random.sample([*owners], DRAWN) if len(owners) > DRAWN else owners
        return {newest, *drawn}

    def _last(self, drawn: set[str], groups: Mapping[str, str], now: float) -> str:
        """The one of the owners that gives way."""
        (last,) = drawn.difference(self._standing.select(drawn, len(drawn) - 1, now, groups))
        return last

    def _ranked(self, kept: dict[str, _Kept], now: float) -> list[str]:
        groups = {owner: one.group for owner, one in kept.items()}
        return self._standing.select(kept, len(kept), now, groups)


def share_room(sizes: Sequence[int], room: int) -> list[int]:
    """How much of `room` each of several answers may take: all that it needs, if it needs no more than an equal share.

    What the small ones leave is shared by the others.
    """
    shares = [0] * len(sizes)
    left = room
    for rank, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        shares[index] = min(sizes[index], left // (len(sizes) - rank))
        left -= shares[index]
    return shares
