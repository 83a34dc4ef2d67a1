"""The records that a node of the DHT keeps for the swarm, within limits that no stranger can exhaust.

There is at most one record for a key and owner, and the one that expires later wins. An owner has few records; beyond
them, its own records give way. A key has few enough that all of them fit into one answer, and the node has a limit too.
When there is no room, a new record is refused; it never displaces a stored one. Identities cost nothing, so the owners
in one network may use only a share of the room. Records are counted, not weighed: their size is bounded, and by weight
a few large records could take the room of many small ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from swarm.transport.dht.records import MAX_RECORD_BYTES, Record, is_expired

NETWORK_SHARE = 0.25
"""Share of the records under a key, and of all, that the owners in one network may have together."""


@dataclass(frozen=True)
class StoreLimits:
    """How many records a node keeps: of one owner, under one key, and in all.

    A server has its announcement, its model record, and for a while the announcements of blocks that it has left.
    """

    owner_records: int = 8
    key_records: int = 256
    records: int = 4096


@dataclass(slots=True)
class _Owner:
    """What is kept of one owner.

    Attributes:
        network: where its first record came from.
    """

    network: str
    keys: set[bytes] = field(default_factory=set)


class RecordStore:
    """Records by key and owner. All times are Unix times, passed in by the caller."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._by_key: dict[bytes, dict[str, Record]] = {}
        self._owners: dict[str, _Owner] = {}
        self._by_network = Counter[str]()
        self._bytes = 0

    def __len__(self) -> int:
        return self._by_network.total()

    @property
    def size_bytes(self) -> int:
        """Bytes of subkeys and values."""
        return self._bytes

    def has_any_of(self, owner: str) -> bool:
        """Whether the owner has records here."""
        return owner in self._owners

    def store(self, record: Record, owner: str, now: float, network: str = "") -> bool:
        """Keep a valid record of `owner`. False if it is over, if a newer one is known, or if there is no room for it.

        Args:
            network: that the owner is in.
        """
        if is_expired(record.expires, now) or record.size_bytes > MAX_RECORD_BYTES:
            return False
        known = self._by_key.get(record.key, {}).get(owner)
        if known is not None:
            if known.expires >= record.expires:
                return False
            self._drop(record.key, owner)
        elif not self._has_room(record.key, network, now):
            return False
        kept = self._owners.setdefault(owner, _Owner(network))
        kept.keys.add(record.key)
        self._by_network[kept.network] += 1
        self._by_key.setdefault(record.key, {})[owner] = record
        self._bytes += record.size_bytes
        if len(kept.keys) > self._limits.owner_records:
            # The one that expires first, but not what it has just stored.
            self._drop(min(kept.keys - {record.key}, key=lambda key: (self._by_key[key][owner].expires, key)), owner)
        return True

    def find(self, key: bytes, now: float) -> list[Record]:
        """The records under a key."""
        self._drop_expired(key, now)
        return list(self._by_key.get(key, {}).values())

    def remove_expired(self, now: float) -> None:
        """Drop all records that are over."""
        for key in list(self._by_key):
            self._drop_expired(key, now)

    def _has_room(self, key: bytes, network: str, now: float) -> bool:
        """Whether one more record of an owner in this network may lie under the key."""
        self._drop_expired(key, now)
        under_key = [self._owners[owner].network for owner in self._by_key.get(key, {})]
        return all(
            total < limit and same < limit * NETWORK_SHARE
            for total, same, limit in (
                (len(under_key), under_key.count(network), self._limits.key_records),
                (len(self), self._by_network[network], self._limits.records),
            )
        )

    def _drop(self, key: bytes, owner: str) -> None:
        kept = self._owners[owner]
        self._bytes -= self._by_key[key].pop(owner).size_bytes
        self._by_network[kept.network] -= 1
        if not self._by_network[kept.network]:
            del self._by_network[kept.network]
        if not self._by_key[key]:
            del self._by_key[key]
        kept.keys.discard(key)
        if not kept.keys:
            del self._owners[owner]

    def _drop_expired(self, key: bytes, now: float) -> None:
        kept = self._by_key.get(key, {})
        for owner in [owner for owner, record in kept.items() if is_expired(record.expires, now)]:
            self._drop(key, owner)
