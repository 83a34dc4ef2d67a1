"""The records that a node of the DHT keeps for the swarm, within limits that no stranger can exhaust.

There is at most one record for a key and owner, and the one that expires later wins. An owner has few records; beyond
them, its own records give way. A key has few enough that all of them fit into one answer, and the node has a limit too;
beyond these, the owner that `best_first` names last gives way. Records are counted, not weighed: their size is bounded,
and by weight a few large records could take the room of many small ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.transport.dht.records import MAX_RECORD_BYTES, Record, is_expired


@dataclass(frozen=True)
class StoreLimits:
    """How many records a node keeps: of one owner, under one key, and in all.

    A server has its announcement, its model record, and for a while the announcements of blocks that it has left.
    """

    owner_records: int = 8
    key_records: int = 256
    records: int = 4096


DRAWN = 256
"""Owners among whom is chosen who gives way: all of a key, and of the node's enough to know a newcomer when there is
one. To choose among 4096 for each record takes a hundred times as long as to verify it."""


ESTABLISHED_AFTER_S = 600.0
"""An owner whose records have been known for so long is established."""

ESTABLISHED_SHARE = 0.75
"""Share of the places that established owners may take from new ones, so that none can occupy a key forever."""


def best_first(
    owners: Iterable[str],
    places: int,
    now: float,
    since: Mapping[str, float],
    networks: Mapping[str, str] | None = None,
    served: Collection[str] = (),
) -> list[str]:
    """The owners whose records are kept where there are so many places, the best first. Pure.

    Identities cost nothing, so ten thousand new ones must not displace those that were there before. Owners that have
    served this peer come first, then established ones, the longest known first. What remains, a quarter of the places
    at least, goes to the others by a lottery whose tickets each process keeps secret.

    Args:
        since: owner -> when it became known.
        networks: owner -> the network that it is in. Networks get the places of new owners in turn, so that many
            owners in one network compete with each other, not with those elsewhere.
        served: owners that have done what this peer asked for.
    """
    served, networks = set(served), networks or {}
    firsts = {owner: since.get(owner, now) for owner in owners}
    established = [one for one, first in firsts.items() if one in served or now - first >= ESTABLISHED_AFTER_S]
    established.sort(key=lambda one: (one not in served, firsts[one]))
    sure = max(sum(one in served for one in established), int(places * ESTABLISHED_SHARE))
    kept = established[: min(sure, places)]
    order: list[tuple[int, int, str]] = []
    turns = Counter[str]()
    for owner in sorted(firsts.keys() - set(kept), key=hash):  # Python's hash of a text depends on a secret
        network = networks.get(owner, "")
        turns[network] += 1
        order.append((turns[network], hash(owner), owner))
    return kept + [owner for _, _, owner in sorted(order)][: places - len(kept)]


@dataclass(slots=True)
class _Owner:
    """What is kept of one owner.

    Attributes:
        since: when the first of its records came; it has had some ever since.
        network: where its last one came from.
    """

    since: float
    network: str = ""
    keys: set[bytes] = field(default_factory=set)


class RecordStore:
    """Records by key and owner. All times are Unix times, passed in by the caller."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._by_key: dict[bytes, dict[str, Record]] = {}
        self._owners: dict[str, _Owner] = {}
        self._random = random.Random()
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of subkeys and values."""
        return self._bytes

    def is_established(self, owner: str, now: float) -> bool:
        """Whether the owner has long had records here."""
        return owner in self._owners and now - self._owners[owner].since >= ESTABLISHED_AFTER_S

    def store(self, record: Record, owner: str, now: float, network: str = "") -> bool:
        """Keep a valid record of `owner`. False if it is over, if a newer one is known, or if there is no room for it.

        Args:
            network: that the owner is in; see `best_first`.
        """
        known = self._by_key.get(record.key, {}).get(owner)
        if is_expired(record.expires, now) or record.size_bytes > MAX_RECORD_BYTES:
            return False
        if known is not None and known.expires >= record.expires:
            return False
        self._put(record, owner, now, network)
        self._limit_owner(owner, record.key)
        self._limit_key(record.key, owner, now)
        self._limit_all(owner, now)
        return owner in self._by_key.get(record.key, {})

    def find(self, key: bytes, now: float) -> list[Record]:
        """The records under a key, those that should be read first at the front."""
        self._drop_expired(key, now)
        kept = self._by_key.get(key, {})
        return [kept[owner] for owner in self._best_first(kept, len(kept), now)]

    def remove_expired(self, now: float) -> None:
        """Drop all records that are over."""
        for key in list(self._by_key):
            self._drop_expired(key, now)

    def _put(self, record: Record, owner: str, now: float, network: str) -> None:
        kept = self._owners.setdefault(owner, _Owner(now))
        kept.keys.add(record.key)
        kept.network = network
        records = self._by_key.setdefault(record.key, {})
        self._bytes += record.size_bytes - (records[owner].size_bytes if owner in records else 0)
        self._count += owner not in records
        records[owner] = record

    def _drop(self, key: bytes, owner: str) -> None:
        self._bytes -= self._by_key[key].pop(owner).size_bytes
        self._count -= 1
        if not self._by_key[key]:
            del self._by_key[key]
        self._owners[owner].keys.discard(key)
        if not self._owners[owner].keys:
            del self._owners[owner]

    def _drop_expired(self, key: bytes, now: float) -> None:
        kept = self._by_key.get(key, {})
        for owner in [owner for owner, record in kept.items() if is_expired(record.expires, now)]:
            self._drop(key, owner)

    def _limit_owner(self, owner: str, newest: bytes) -> None:
        """Of an owner with too many records, drop the one that expires first, but not what it has just stored."""
        keys = self._owners[owner].keys
        while len(keys) > self._limits.owner_records:
            self._drop(min(keys - {newest}, key=lambda key: (self._by_key[key][owner].expires, key)), owner)

    def _limit_key(self, key: bytes, newest: str, now: float) -> None:
        kept = self._by_key[key]
        if len(kept) > self._limits.key_records:
            self._drop_expired(key, now)
        if len(kept) > self._limits.key_records:
            self._drop(key, self._last(self._draw(kept, newest), now))

    def _limit_all(self, newest: str, now: float) -> None:
        if self._count > self._limits.records:
            drawn = self._draw(self._owners, newest)
            held = [(key, owner) for owner in drawn for key in self._owners[owner].keys]
            over = [(key, owner) for key, owner in held if is_expired(self._by_key[key][owner].expires, now)]
            if not over:
                last = self._last(drawn, now)
                over = [one for one in held if one[1] == last]
            for key, owner in over:
                self._drop(key, owner)

    def _draw(self, owners: Collection[str], newest: str) -> set[str]:
        """Some of the owners, and whose record was stored just now."""
        drawn = self._random.sample([*owners], DRAWN) if len(owners) > DRAWN else owners
        return {newest, *drawn}

    def _last(self, drawn: set[str], now: float) -> str:
        """The one of the owners that gives way."""
        (last,) = drawn.difference(self._best_first(drawn, len(drawn) - 1, now))
        return last

    def _best_first(self, owners: Iterable[str], places: int, now: float) -> list[str]:
        owners = list(owners)
        since = {owner: self._owners[owner].since for owner in owners}
        return best_first(owners, places, now, since, {owner: self._owners[owner].network for owner in owners})


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
