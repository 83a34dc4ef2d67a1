"""How much of a swarm's DHT a look-up finds while nodes lie to it. A simulation: nothing is sent.

    python -m benchmarks.network.hostile_lookups

All nodes know each other as Kademlia's nodes do: up to 20 in each bucket. A reader that knows some of them looks for
the keys of a model's blocks. A record lies at the 8 honest nodes nearest to its key, and is found if one of them is
asked. Liars name others that answer and lie as well ("strangers", at random places, or "neighbors", nearer to the key
than all honest nodes), or nodes that are not there ("nobody", likewise beside the key).
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hivemind.p2p import PeerID

from benchmarks.common.machine import describe
from swarm.transport.dht.node import CONCURRENCY, FIND_BREADTH, KEYS_PER_SEARCH, REPLICAS
from swarm.transport.dht.routing_table import BUCKET_NODES, node_id_of, position
from swarm.transport.dht.search import Request, Search

KNOWN_TO_READER = 40
NAMED_BY_LIARS = 20
Names = Callable[[bytes], Sequence[PeerID]]
"""What a node answers: the nodes that it names for a key."""


@dataclass(frozen=True)
class Outcome:
    """What one look-up found, as shares of the keys and numbers of requests and seconds."""

    found: float
    holders: float
    requests: int
    failed: int
    seconds: float


def random_peer(rng: random.Random) -> PeerID:
    """A peer id at a random place."""
    return PeerID(b"\x12\x20" + rng.randbytes(32))


def table_of(own: PeerID, peers: Sequence[PeerID], rng: random.Random) -> list[PeerID]:
    """The nodes that `own` knows of a swarm: up to `BUCKET_NODES` for each length of a common prefix."""
    buckets: dict[int, list[PeerID]] = {}
    place = position(node_id_of(own))
    for peer in rng.sample(peers, len(peers)):
        bucket = buckets.setdefault((position(node_id_of(peer)) ^ place).bit_length(), [])
        if len(bucket) < BUCKET_NODES and peer != own:
            bucket.append(peer)
    return [peer for bucket in buckets.values() for peer in bucket]


def nearest(peers: Sequence[PeerID], key: bytes, count: int) -> list[PeerID]:
    """The peers nearest to a key."""
    place = position(key)
    return heapq.nsmallest(count, peers, key=lambda peer: position(node_id_of(peer)) ^ place)


class LyingNodes:
    """Whom liars name, and what those answer.

    Args:
        kind: see the module.
        pool: of how many they choose.
    """

    def __init__(self, kind: str, rng: random.Random, pool: int) -> None:
        self._kind = kind
        self._rng = rng
        self._pool = [random_peer(rng) for _ in range(pool)]
        self._named: dict[bytes, list[PeerID]] = {}

    def names(self, key: bytes) -> list[PeerID]:
        """The nodes that one of the liars names for a key."""
        if self._kind == "strangers":
            return self._rng.sample(self._pool, NAMED_BY_LIARS)
        if key not in self._named:
            self._named[key] = nearest(self._pool, key, 200)
        return self._rng.sample(self._named[key], NAMED_BY_LIARS)

    def __contains__(self, peer: PeerID) -> bool:
        return self._kind != "nobody"


def look_up(search: Search, answers: Callable[[PeerID], Names | None], rng: random.Random) -> tuple[set, int, int]:
    """Play a search to its end. Returns what was asked of whom, the number of requests, and of those in vain."""
    asked: set[tuple[PeerID, bytes]] = set()
    waiting: list[Request] = []
    requests = failed = 0
    while True:
        while len(waiting) < CONCURRENCY and (request := search.next_request()) is not None:
            waiting.append(request)
        if not waiting:
            return asked, requests, failed
        request = waiting.pop(rng.randrange(len(waiting)))
        requests += 1
        names = answers(request.peer)
        if names is None:
            failed += 1
            search.failed(request)
        else:
            asked.update((request.peer, key) for key in request.targets)
            search.answered(request, {key: names(key) for key in request.targets})


def simulate(honest: int, liars: int, kind: str, seed: int) -> Outcome:
    """One look-up in one swarm."""
    rng = random.Random(seed)
    peers = [random_peer(rng) for _ in range(honest + liars)]
    hostile = set(peers[honest:])
    lying = LyingNodes(kind, rng, 20_000 if kind != "strangers" else 5_000)
    tables: dict[PeerID, list[PeerID]] = {}
    keys = [rng.randbytes(20) for _ in range(KEYS_PER_SEARCH)]

    def answers(peer: PeerID) -> Names | None:
        if peer in everybody and peer not in hostile:
            table = tables.get(peer) or tables.setdefault(peer, table_of(peer, peers, rng))
            return lambda key: nearest(table, key, BUCKET_NODES)
        return lying.names if peer in hostile or peer in lying else None

    everybody = set(peers)
    known = rng.sample(peers, min(KNOWN_TO_READER, len(peers)))
    began = time.process_time()
    search = Search(keys, known, FIND_BREADTH, random_peer(rng))
    asked, requests, failed = look_up(search, answers, rng)
    seconds = time.process_time() - began
    found = [sum((peer, key) in asked for peer in nearest(peers[:honest], key, REPLICAS)) / REPLICAS for key in keys]
    return Outcome(sum(map(bool, found)) / len(keys), statistics.mean(found), requests, failed, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, nargs="+", default=[50, 1000])
    parser.add_argument("--liars", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["strangers", "neighbors", "nobody"])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in describe().items()))
    print("honest  liars  who is named  keys found  holders asked  requests  in vain  processor s")
    for honest in options.honest:
        for liars, kind in [(0, "nobody"), *((count, kind) for kind in options.kinds for count in options.liars)]:
            outcomes = [simulate(honest, liars, kind, seed) for seed in range(options.seeds)]
            found, holders, requests, failed, seconds = (
                statistics.mean(getattr(one, name) for one in outcomes)
                for name in ("found", "holders", "requests", "failed", "seconds")
            )
            print(
                f"{honest:6}  {liars:5}  {kind if liars else '-':12}  {found:10.0%}  {holders:13.0%}  {requests:8.0f}"
                f"  {failed:7.0f}  {seconds:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
