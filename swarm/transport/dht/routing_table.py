"""The nodes of the DHT that a node knows, by distance (Kademlia: Maymounkov and Mazieres, 2002, section 2.2).

A node's id is the digest of its peer id, so a node cannot choose its place in the DHT. Nodes that have long been known
keep their places in the table: a new one gets a place only if its bucket has room or a known node stops answering.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache

from hivemind.p2p import PeerID

BUCKET_NODES = 20
SILENT_S = 5.0
"""How long a node that did not answer is not asked again; the time doubles with each further failure."""

MAX_UNREACHABLE_S = 60.0
"""The longest such time after no answer, so that a node that was restarted is soon asked again."""

MAX_SILENT_S = 300.0
"""The longest such time after a wrong answer."""

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


@dataclass
class _Bucket:
    nodes: OrderedDict[PeerID, int] = field(default_factory=OrderedDict)  # the one heard of longest ago first
    waiting: PeerID | None = None
    asked: PeerID | None = None
    """The node that is being pinged, on behalf of the one that waits for its place."""


@dataclass(frozen=True, slots=True)
class _Silence:
    until: float
    seconds: float


class RoutingTable:
    """Known nodes, in one bucket for each length of the prefix that their id shares with this node's.

    All times are seconds of one clock, passed in by the caller.
    """

    def __init__(self, own: PeerID) -> None:
        self._own = own
        self._own_id = position(node_id_of(own))
        self._buckets: dict[int, _Bucket] = {}
        self._silent: OrderedDict[PeerID, _Silence] = OrderedDict()

    def __len__(self) -> int:
        """Known nodes. May be called from any thread: a bucket may be added meanwhile, hence the copy."""
        return sum(len(bucket.nodes) for bucket in list(self._buckets.values()))

    def __contains__(self, peer: PeerID) -> bool:
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        return bucket is not None and peer in bucket.nodes

    def peer_ids(self) -> list[str]:
        """All known nodes."""
        return [peer.to_base58() for bucket in self._buckets.values() for peer in bucket.nodes]

    def add(self, peer: PeerID) -> PeerID | None:
        """A node was heard of. If its bucket is full, it waits, and the node to ping is returned.

        Only one waits at a time: until the ping is answered or has failed, further new nodes are ignored.
        """
        if peer == self._own:
            return None
        node = position(node_id_of(peer))
        bucket = self._buckets.setdefault(self._bucket_of(node), _Bucket())
        if peer in bucket.nodes or len(bucket.nodes) < BUCKET_NODES:
            bucket.nodes[peer] = node
            bucket.nodes.move_to_end(peer)
            return None
        if bucket.waiting is not None:
            return None
        bucket.waiting, bucket.asked = peer, next(iter(bucket.nodes))
        return bucket.asked

    def answered(self, peer: PeerID) -> None:
        """A node answered; a node that waited for its place does not get it."""
        self._silent.pop(peer, None)
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        if bucket is not None and peer in bucket.nodes:
            if peer == bucket.asked:
                bucket.waiting = bucket.asked = None
            bucket.nodes.move_to_end(peer)

    def failed(self, peer: PeerID, now: float, silence_s: float = SILENT_S) -> None:
        """A node did not answer, or wrongly: it loses its place, and is not asked for a while."""
        known = self._silent.pop(peer, None)
        seconds = min(max(silence_s, 2 * known.seconds if known else 0.0), max(silence_s, MAX_UNREACHABLE_S))
        self._silent[peer] = _Silence(now + seconds, seconds)
        if len(self._silent) > MAX_SILENT_NODES:
            self._silent.popitem(last=False)
        bucket = self._buckets.get(self._bucket_of(position(node_id_of(peer))))
        if bucket is None or bucket.nodes.pop(peer, None) is None:
            return
        if bucket.waiting is not None:
            bucket.nodes[bucket.waiting] = position(node_id_of(bucket.waiting))
            bucket.waiting = bucket.asked = None

    def longest_unheard(self) -> list[PeerID]:
        """Of each bucket, the node that was heard of longest ago, which is the most likely to be gone."""
        return [next(iter(bucket.nodes)) for bucket in self._buckets.values() if bucket.nodes]

    def is_silent(self, peer: PeerID, now: float) -> bool:
        """Whether the node has failed, and should not be asked yet."""
        known = self._silent.get(peer)
        return known is not None and now < known.until

    def nearest(self, key: bytes, count: int, exclude: PeerID | None = None) -> list[PeerID]:
        """The known nodes nearest to `key`, nearest first."""
        wanted = position(key)
        nodes = (
            (wanted ^ node, peer)
            for bucket in self._buckets.values()
            for peer, node in bucket.nodes.items()
            if peer != exclude
        )
        return [peer for _, peer in heapq.nsmallest(count, nodes, key=lambda pair: pair[0])]

    def _bucket_of(self, node: int) -> int:
        return (node ^ self._own_id).bit_length()
