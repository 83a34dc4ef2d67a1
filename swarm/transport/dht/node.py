"""This peer's node of the DHT: joins by initial peers, finds records, and stores its own.

A look-up is bounded in time and runs for one caller: if it hangs, no other caller waits for it. What was found is
remembered until it expires, so a look-up that is cut short, or that only liars answer, makes nothing vanish.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hivemind.p2p import P2P, PeerID

from swarm.common.warn_once import WarnOnce
from swarm.errors import ClockDiffers, DhtError, SwarmError
from swarm.transport.dht.protocol import REQUEST_TIMEOUT_S, DhtProtocol
from swarm.transport.dht.records import Accepted, Record, RecordRules, is_expired, key_bytes, sign
from swarm.transport.dht.routing_table import BUCKET_NODES, node_id_of
from swarm.transport.dht.search import Request, Search
from swarm.transport.identity import Identity
from swarm.transport.members.dht_lock import CLOCKS_DIFFER
from swarm.transport.reach.address_book import AddressBook

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 10.0
"""A look-up takes at most so long; what it has found by then is its result."""

REPLICAS = 8
"""Nodes that are asked to keep a record."""

FIND_BREADTH = 16
"""Nodes that are asked for a key, besides those that are found on the way to them."""

CONCURRENCY = 32
"""Requests of one look-up that are under way at a time. In a swarm of a thousand nodes, reading 80 keys takes some 800
requests to as many nodes, and most of their time goes into connecting."""

KEYS_PER_SEARCH = 64
"""Keys that are searched together. Choosing the next node to ask takes time in proportion to them, and all their
neighborhoods have to fit into what one search learns."""

MIN_SEARCH_S = 0.1
"""What the last keys get if the first ones took all of a look-up's time."""

MAX_FOUND = 512
"""Records under one key that a reader keeps."""

MAX_REMEMBERED = 8192
"""Records that a reader remembers, under the keys that it looked up last. Each takes ten kilobytes at most."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that may be believed: its owner's peer id, what the owner says, and when it expires (Unix time)."""

    owner: str
    payload: bytes
    expires: float


class DhtNode:
    """A node of the DHT. Start it with `create`, end it with `shutdown`.

    Attributes:
        p2p: the libp2p daemon.
        protocol: the exchanges with other nodes.
        served: peers that have done what this one asked for, and not failed since; their records are kept first.
        book: where other peers can be dialed, as their records say.
    """

    def __init__(
        self,
        p2p: P2P,
        identity: Identity,
        rules: RecordRules,
        initial_peers: Sequence[PeerID] = (),
        is_client: bool = False,
        book: AddressBook | None = None,
    ) -> None:
        self.p2p = p2p
        self.book = book if book is not None else AddressBook()
        self.served: set[str] = set()
        self.protocol = DhtProtocol(p2p, rules, is_client)
        self._identity = identity
        self._initial_peers = tuple(initial_peers)
        self._own: PeerID = p2p.peer_id
        self._found: OrderedDict[bytes, dict[str, Record]] = OrderedDict()
        self._since: dict[str, float] = {}
        """When each owner of those records was first found."""
        self._warn_once = WarnOnce(logger)

    async def join(self) -> None:
        """Answer other nodes unless this is a client, and get to know those near the initial peers.

        Raises `ClockDiffers` if they answered but clocks differ or they cannot reach this node, `DhtError` if none did.
        """
        if not self.protocol.is_client:
            await self.protocol.serve()
        if self._initial_peers:
            await self._meet_initial_peers()
        if not self.protocol.is_client:
            self.protocol.watch_table()

    async def serve_others(self, wanted: bool) -> None:
        """Answer other nodes from now on, and have them name this one to others; or no longer."""
        if wanted == self.protocol.is_client:
            await (self.protocol.become_server() if wanted else self.protocol.become_client())

    async def _meet_initial_peers(self) -> None:
        pings = (self.protocol.call_ping(peer, validate=True) for peer in self._initial_peers)
        results = await asyncio.gather(*pings, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ClockDiffers):
                raise result
        if True not in results:
            raise next((one for one in results if isinstance(one, ClockDiffers)), None) or DhtError(
                "none of the initial peers answered a ping; check that one of them is running"
            )
        with suppress(DhtError):  # one of them has answered a ping, so this peer has joined
            await self._nearest_nodes([node_id_of(self._own)], REQUEST_TIMEOUT_S)

    @property
    def known_peers(self) -> list[str]:
        """Ids of the other nodes that this one knows."""
        return self.protocol.table.peer_ids()

    def knows(self, peer_id: str) -> bool:
        """Whether another peer is among the nodes that this one knows, and answered when it was asked last."""
        try:
            return PeerID.from_base58(peer_id) in self.protocol.table
        except ValueError:  # any peer may have sent it
            return False

    async def shutdown(self) -> None:
        """Stop answering. Raises whatever hivemind raises if the daemon has ended."""
        await self.protocol.close()

    async def find(self, names: Collection[str], timeout_s: float = LOOKUP_TIMEOUT_S) -> dict[str, list[FoundRecord]]:
        """The records under each key, at most one for an owner: those found within `timeout_s` and those found before.

        So a look-up that is cut short, or that only liars answer, removes nothing. Raises `ClockDiffers` if all records
        seem to have expired because this machine's clock is wrong, `DhtError` if no known node answered.
        """
        keys = {key_bytes(name): name for name in names}
        doubtful = False
        answered: list[PeerID] = []
        now = time.time()
        found = {key: self._remembered(key, now) for key in keys}
        for key in keys:
            self._collect(found[key], self._own_records(key, now))

        async def ask(request: Request) -> dict[bytes, list[PeerID]]:
            nonlocal doubtful
            answer = await self.protocol.call_find(request.peer, request.targets)
            answered.append(request.peer)
            doubtful = doubtful or answer.all_over
            for key, records in answer.records.items():
                self._collect(found[key], records)
            return answer.neighbors

        deadline, wanted = time.monotonic() + timeout_s, list(keys)
        any_answered, failure = False, None
        try:
            for first in range(0, len(wanted), KEYS_PER_SEARCH):
                share = KEYS_PER_SEARCH / max(KEYS_PER_SEARCH, len(wanted) - first)  # the last keys need time as well
                left_s = max((deadline - time.monotonic()) * share, MIN_SEARCH_S)
                try:
                    await self._search(wanted[first : first + KEYS_PER_SEARCH], FIND_BREADTH, ask, left_s)
                    any_answered = True
                except DhtError as error:  # what the other keys' nodes have answered is not lost
                    failure = error
        finally:
            self._remember(found)
        if failure is not None and not any_answered:
            raise failure
        if doubtful and not any(found.values()):
            await self._require_same_clock(answered[:FIND_BREADTH])
        return {name: self._kept(found[key]) for key, name in keys.items()}

    async def store(
        self, records: Sequence[tuple[str, bytes, float]], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> list[bool]:
        """Sign records (key's name, payload, expiry) and store them at the nearest nodes; whether each is kept.

        Raises `ClockDiffers` if no other node keeps any because this machine's clock is wrong, `DhtError` if no known
        node answered and this peer keeps no records itself.
        """
        signed = [sign(name, payload, expires, self._identity.private_key) for name, payload, expires in records]
        holders: list[list[PeerID]] = [[] for _ in signed]
        try:
            holders = await self._nearest_nodes([_beside(record.key) for record in signed], timeout_s)
        except DhtError as error:
            if self.protocol.is_client or isinstance(error, ClockDiffers):
                raise
            logger.debug("stored here only: %s", error)
        kept = [False] * len(signed)
        wanted: dict[PeerID, list[int]] = {}
        for number, (record, near) in enumerate(zip(signed, holders, strict=True)):
            if not self.protocol.is_client and self._is_among_nearest(record.key, near):
                kept[number] = self._store_here(record)
            for peer in near[:REPLICAS]:
                wanted.setdefault(peer, []).append(number)

        refusers: list[PeerID] = []

        async def store_at(peer: PeerID, numbers: list[int]) -> None:
            try:
                stored = await self.protocol.call_store(peer, [signed[number] for number in numbers])
            except SwarmError as error:
                logger.debug("…%s keeps no record: %s", str(peer)[-6:], error)
                return
            if not any(stored):
                refusers.append(peer)
            for number, is_stored in zip(numbers, stored, strict=True):
                kept[number] = kept[number] or is_stored

        await asyncio.gather(*(store_at(peer, numbers) for peer, numbers in wanted.items()))
        if len(refusers) == len(wanted):
            await self._require_same_clock(refusers)
        return kept

    async def _require_same_clock(self, peers: Collection[PeerID]) -> None:
        """Raise `ClockDiffers` if the clock of every peer that answers differs from this machine's."""
        pings = (self.protocol.call_ping(peer, validate=True, must_reach=False) for peer in peers)
        results = await asyncio.gather(*pings, return_exceptions=True)
        answers = [result for result in results if result is not False]
        if answers and all(isinstance(result, ClockDiffers) for result in answers):
            raise ClockDiffers(f"records of the DHT seem old: {answers[0]}. Set this machine's clock")

    def _own_records(self, key: bytes, now: float) -> list[tuple[str, Record]]:
        verdicts = ((self.protocol.checker.check(record), record) for record in self.protocol.store.find(key, now))
        return [(verdict.owner, record) for verdict, record in verdicts if isinstance(verdict, Accepted)]

    def _store_here(self, record: Record) -> bool:
        verdict = self.protocol.checker.check(record)
        return isinstance(verdict, Accepted) and self.protocol.store.store(record, verdict.owner, time.time())

    def _is_among_nearest(self, key: bytes, others: Sequence[PeerID]) -> bool:
        return len(others) < REPLICAS or _distance(self._own, key) < _distance(others[REPLICAS - 1], key)

    def _collect(self, known: dict[str, Record], records: Sequence[tuple[str, Record]]) -> None:
        """Add records to those of a key; of two of one owner the one that expires later is the newer one."""
        for owner, record in records:
            if owner not in known or known[owner].expires < record.expires:
                known[owner] = record
        if len(known) > MAX_FOUND:
            for owner in self.best_first(known)[MAX_FOUND:]:
                del known[owner]

    def best_first(self, owners: Iterable[str]) -> list[str]:
        """The owners, those whose records should be kept first: those that served this peer, then the longest known.

        So new identities, however many, cannot displace owners that were known before.
        """
        return sorted(owners, key=lambda owner: (owner not in self.served, self._since.get(owner, math.inf)))

    def _remembered(self, key: bytes, now: float) -> dict[str, Record]:
        """What was found under a key before, and is not over."""
        known = self._found.get(key, {})
        return {owner: record for owner, record in known.items() if not is_expired(record.expires, now)}

    def _remember(self, found: Mapping[bytes, dict[str, Record]]) -> None:
        """Remember what was found, beside what look-ups found that have ended meanwhile."""
        now = time.time()
        for key, records in found.items():
            known = self._remembered(key, now)
            self._found.pop(key, None)
            self._collect(known, list(records.items()))
            if known:
                self._found[key] = known
        total = sum(map(len, self._found.values()))
        while total > MAX_REMEMBERED:
            total -= len(self._found.popitem(last=False)[1])
        self._since = {owner: self._since.get(owner, now) for known in self._found.values() for owner in known}

    def _kept(self, known: dict[str, Record]) -> list[FoundRecord]:
        verdicts = ((self.protocol.checker.check(record), record.expires) for record in known.values())
        return [
            FoundRecord(verdict.owner, verdict.payload, expires)
            for verdict, expires in verdicts
            if isinstance(verdict, Accepted)
        ]

    async def _nearest_nodes(self, keys: Sequence[bytes], timeout_s: float) -> list[list[PeerID]]:
        async def ask(request: Request) -> dict[bytes, list[PeerID]]:
            return (await self.protocol.call_find(request.peer, request.targets)).neighbors

        search = await self._search(keys, REPLICAS, ask, timeout_s)
        return [search.nearest(key, REPLICAS) for key in keys]

    async def _search(
        self,
        keys: Sequence[bytes],
        breadth: int,
        ask: Callable[[Request], Awaitable[dict[bytes, list[PeerID]]]],
        timeout_s: float,
    ) -> Search:
        """Ask the nodes near the keys, until all have answered or failed, or time is up. Raises `DhtError`."""
        known, table = self._known_nodes(keys), self.protocol.table
        search = Search(keys, known, breadth, self._own, lambda peer: table.is_silent(peer, time.monotonic()))
        running: dict[asyncio.Task[dict[bytes, list[PeerID]]], Request] = {}
        failure: SwarmError | None = None
        deadline = time.monotonic() + timeout_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                while len(running) < CONCURRENCY and (request := search.next_request()) is not None:
                    running[asyncio.ensure_future(ask(request))] = request
                if not running:
                    break
                done, _ = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failure = _take_answer(search, running.pop(task), task) or failure
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if running:
            self._warn_once(
                f"a look-up of the DHT took more than {timeout_s:.0f} s, and may not have found all there is; what was "
                "known before is used, too"
            )
        if known and not search.any_answered:
            if CLOCKS_DIFFER in str(failure):
                raise ClockDiffers("members of this private swarm refuse old requests. Set this machine's clock")
            raise DhtError(
                f"none of the {len(known)} known nodes of the DHT answered; check this machine's network and the "
                "initial peers, and try again"
            )
        return search

    def _known_nodes(self, keys: Sequence[bytes]) -> list[PeerID]:
        """The nodes that a search begins with: those nearest to the keys, and the initial peers."""
        now, table = time.monotonic(), self.protocol.table
        nearest = (peer for key in keys for peer in table.nearest(key, BUCKET_NODES))
        known = list(dict.fromkeys([*nearest, *self._initial_peers]))
        return [peer for peer in known if not table.is_silent(peer, now)] or known


def _take_answer(search: Search, request: Request, task: asyncio.Task[dict[bytes, list[PeerID]]]) -> SwarmError | None:
    error = task.exception()  # not raised here: it would keep the task, which keeps it
    if error is None:
        search.answered(request, task.result())
    elif isinstance(error, SwarmError):
        logger.debug("…%s did not answer: %s", str(request.peer)[-6:], error)
        search.failed(request)
        return error
    else:
        raise error
    return None


def _beside(key: bytes) -> bytes:
    """A key at which nothing lies, as near to `key` as can be: its nodes are found without reading what they keep."""
    return key[:-1] + bytes([key[-1] ^ 1])


def _distance(peer: PeerID, key: bytes) -> int:
    return int.from_bytes(node_id_of(peer), "big") ^ int.from_bytes(key, "big")
