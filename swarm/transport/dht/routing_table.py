"""The nodes of the DHT that a node knows, by distance (Kademlia: Maymounkov and Mazieres, 2002, section 2.2).

A node's id is the digest of its peer id, so a node cannot choose its place in the DHT. Nodes that have long been known
keep their places in the table: a new one gets a place only if its bucket has room, because another has not answered.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from functools import lru_cache

from hivemind.p2p import PeerID

BUCKET_NODES = 20
SILENT_S = 30.0
"""How long a node that did not answer is not asked again: one that was restarted is soon asked."""

WRONG_SILENT_S = 300.0
"""The same after a wrong answer."""

MAX_SILENT_NODES = 1024


def node_id_of(peer: PeerID) -> bytes:
    """The only id that the peer may have as a node of the DHT: a key, so that nodes and records have distances."""
    return _node_id(peer.to_bytes())


@lru_cache(maxsize=4096)
def _node_id(peer: bytes) -> bytes:
    return hashlib.sha1(peer, usedforsecurity=False).digest()


def position(key: bytes) -> int:
    """A key, or a node's id, as a number; the distance of two is their exclusive or."""
    return int.from_bytes(key, "big")


class RoutingTable:
    """Known nodes, in one bucket for each length of the prefix that their id shares with this node's.

    All times are seconds of one clock, passed in by the caller.
    """

    def __init__(self, own: PeerID) -> None:
        self._own = own
        self._own_id = position(node_id_of(own))
        self._buckets: dict[int, OrderedDict[PeerID, int]] = {}
        """Each node with its place; the one heard of longest ago comes first."""
        self._silent: OrderedDict[PeerID, float] = OrderedDict()
        """Until when nodes are not asked."""

    def __len__(self) -> int:
        """Known nodes. May be called from any thread: a bucket may be added meanwhile, hence the copy."""
        return sum(map(len, list(self._buckets.values())))

    def __contains__(self, peer: PeerID) -> bool:
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        return bucket is not None and peer in bucket

    def peer_ids(self) -> list[str]:
        """All known nodes."""
        return [peer.to_base58() for bucket in self._buckets.values() for peer in bucket]

    def add(self, peer: PeerID) -> None:
        """A node was heard of."""
        if peer == self._own:
            return
        node = position(node_id_of(peer))
        bucket = self._buckets.setdefault(self._bucket_of(node), OrderedDict())
        if peer in bucket or len(bucket) < BUCKET_NODES:
            bucket[peer] = node
            bucket.move_to_end(peer)

    def answered(self, peer: PeerID) -> None:
        """A node answered."""
        self._silent.pop(peer, None)
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        if bucket is not None and peer in bucket:
            bucket.move_to_end(peer)

    def failed(self, peer: PeerID, now: float, silence_s: float = SILENT_S) -> None:
        """A node did not answer, or wrongly: it loses its place, and is not asked for a while."""
        self._silent[peer] = max(now + silence_s, self._silent.pop(peer, now))
        if len(self._silent) > MAX_SILENT_NODES:
            self._silent.popitem(last=False)
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        if bucket is not None:
            bucket.pop(peer, None)

    def longest_unheard(self) -> list[PeerID]:
        """Of each bucket, the node that was heard of longest ago, which is the most likely to be gone."""
        return [next(iter(bucket)) for bucket in self._buckets.values() if bucket]

    def is_silent(self, peer: PeerID, now: float) -> bool:
        """Whether the node has failed, and should not be asked yet."""
        return now < self._silent.get(peer, now)

    def nearest(self, key: bytes, count: int, exclude: PeerID | None = None) -> list[PeerID]:
        """The known nodes nearest to `key`, nearest first."""
        wanted = position(key)
        nodes = (
            (wanted ^ node, peer)
            for bucket in self._buckets.values()
            for peer, node in bucket.items()
            if peer != exclude
        )
        return [peer for _, peer in heapq.nsmallest(count, nodes, key=lambda pair: pair[0])]

    def _bucket_of(self, node: int) -> int:
        return (node ^ self._own_id).bit_length()
