"""What nodes of the DHT do for each other: ping, store and find. Requests and answers are hivemind's protobuf messages.

A node stores a record only for its owner, who must be the peer that sends it. A request is refused before it is read if
it is too long, or if its sender asks too much. Nothing that a peer sends ends anything but its own request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon import P2PContext
from hivemind.proto import dht_pb2

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import ClockDiffers, ProtocolViolation, RequestRefused, SwarmError
from swarm.protocol.messages import PROTOCOL_ID
from swarm.transport.dht import messages
from swarm.transport.dht.hivemind_errors import raise_dht_errors
from swarm.transport.dht.peer_networks import PeerNetworks
from swarm.transport.dht.record_store import RecordStore
from swarm.transport.dht.records import Accepted, Record, RecordChecker, RecordProblem, RecordRules, owner_of
from swarm.transport.dht.routing_table import BUCKET_NODES, WRONG_SILENT_S, RoutingTable, node_id_of

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 3.0
"""How long a node may take to answer."""

MAX_CLOCK_DIFFERENCE_S = 3.0
MAX_BAD_RECORDS = 8
"""Records of one answer that may be invalid, before the rest of it is not looked at. Those that are over, or live too
long, do not count: clocks differ, and they cost next to nothing."""

CHECK_PERIOD_S = 15.0
"""How often a node pings, in each bucket of its routing table, the node that it heard of longest ago, and drops the
records that are over."""

CHECKED_AT_ONCE = 16
"""Records that are checked before other tasks have their turn."""

REQUEST_BURST, REQUESTS_PER_S = 512.0, 64.0
"""Units that a peer may use at once, and then every second. A request is one, and so is each record that it brings,
whose signature has to be verified, and each `ANSWER_UNIT_BYTES` of an answer."""

ANSWER_UNIT_BYTES = 64 * 1024
MAX_PEERS = 4096
"""Peers whose use is remembered; the one that has asked nothing for longest is forgotten first."""

CHECK_BURST, CHECKS_PER_S = 2048.0, 256.0
"""Records whose signature a node verifies for all others together, who may have any number of identities, at once, and
then every second: about 2 % of a processor's time. Servers have two records a minute to be verified at each of 8 nodes.
"""

KNOWN_OWNERS_SHARE = 0.5
"""Share of these that only owners of records that are kept here may use."""

MAX_PINGS_BACK = 256
"""Pings that are under way because other peers asked for them, one for each."""


@dataclass(frozen=True)
class Found:
    """What one node answered.

    Attributes:
        records: key -> its records that may be believed, each with its owner.
        neighbors: key -> nodes that it names, not checked.
        all_over: whether it has records, and all are over, or live too long.
    """

    records: dict[bytes, list[tuple[str, Record]]]
    neighbors: dict[bytes, list[PeerID]]
    all_over: bool = False


def _ignore(refusal: RecordProblem) -> None:
    pass


class DhtProtocol(ServicerBase):  # type: ignore[misc]
    """One node's side of the exchanges.

    Args:
        p2p: the libp2p daemon.
        rules: what the records of the swarm mean.
        is_client: whether this node only asks.

    Attributes:
        observe_refusal: called for each record that is refused.
    """

    def __init__(self, p2p: P2P, rules: RecordRules, is_client: bool) -> None:
        super().__init__()
        self.table = RoutingTable(p2p.peer_id)
        self.store = RecordStore()
        self.checker = RecordChecker(rules)
        self.observe_refusal: Callable[[RecordProblem], None] = _ignore
        node_id = b"" if is_client else node_id_of(p2p.peer_id)
        self.node_info = dht_pb2.NodeInfo(node_id=node_id)
        self.is_client = is_client
        self._p2p = p2p
        self._networks = PeerNetworks(p2p)
        self._requests = TokenBuckets[bytes](REQUEST_BURST, REQUESTS_PER_S, MAX_PEERS)
        self._checks = TokenBuckets[None](CHECK_BURST, CHECKS_PER_S, 1)
        self._pinging_back: set[PeerID] = set()
        self._background: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Answer other peers from now on."""
        self._collect_rpc_handlers()
        for handler in self._rpc_handlers:
            name = handler.method_name
            answer = functools.partial(self._answer, getattr(self, name))
            request_type = _BoundedType(handler.request_type, messages.MAX_REQUEST_BYTES[name])
            await self._p2p.add_protobuf_handler(self._get_handle_name(None, name), answer, request_type)

    async def become_server(self) -> None:
        """Answer other peers from now on, although this node only asked before."""
        self.is_client = False
        self.node_info = dht_pb2.NodeInfo(node_id=node_id_of(self._p2p.peer_id))
        await self.serve()
        self.watch_table()

    async def become_client(self) -> None:
        """Only ask from now on: others cannot reach this node. What runs in the background ends."""
        self.is_client = True
        self.node_info = dht_pb2.NodeInfo(node_id=b"")
        await self._end_background()
        await self.remove_p2p_handlers(self._p2p)

    def watch_table(self) -> None:
        """Find out from now on which known nodes are gone, and forget them. Others are told of the known nodes, and a
        bootstrap peer looks nothing up by which it would notice. Records that are over are forgotten as often."""
        self._run(self._check_nodes())

    async def _check_nodes(self) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            self.store.remove_expired(time.time())
            await asyncio.gather(*map(self.call_ping, self.table.longest_unheard()))

    async def close(self) -> None:
        """End what runs in the background. Raises nothing while the daemon lives."""
        await self._end_background()
        if not self.is_client:
            await self.remove_p2p_handlers(self._p2p)

    async def _end_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"{PROTOCOL_ID}/dht/{method_name}"

    def get_stub(self, peer: PeerID) -> Any:
        """Calls the methods of another node."""
        return super().get_stub(self._p2p, peer)

    # What other peers call.

    async def _answer(self, method: Callable[..., Awaitable[Any]], request: Any, context: P2PContext) -> Any:
        sender = context.remote_id.to_bytes()
        records = len(request.values) if isinstance(request, dht_pb2.StoreRequest) else 0
        if self._requests.left(sender, time.monotonic()) < 1.0:
            raise RequestRefused("too many requests to the DHT; wait a few seconds")
        self._requests.take(sender, 1.0 + records, time.monotonic())
        response = await method(request, context)
        self._requests.take(sender, response.ByteSize() / ANSWER_UNIT_BYTES, time.monotonic())
        return response

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Tell this node's id and time, and whether it can reach the other one if that wants to know."""
        response = dht_pb2.PingResponse(peer=self.node_info, dht_time=time.time(), available=False)
        if request.validate and request.peer.node_id:
            response.available = await self._ping_back(context.remote_id)
        self._meet(request.peer, context.remote_id)
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep the sender's own records."""
        records = messages.stored_records(request)
        self._meet(request.peer, context.remote_id)
        sender = context.remote_id.to_base58()
        network = await self._networks.network_of(sender)
        response = dht_pb2.StoreResponse(peer=self.node_info)
        for record, in_cache in zip(records, request.in_cache, strict=True):
            refusal = RecordProblem.CACHED if in_cache else self._store(record, sender, network)
            if refusal is not None:
                self.observe_refusal(refusal)
            response.store_ok.append(refusal is None)
        return response

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Tell the records under each key, and the nodes near it."""
        keys = messages.sought_keys(request)
        self._meet(request.peer, context.remote_id)
        now = time.time()
        results = messages.found_results([self.store.find(key, now) for key in keys])
        for key, result in zip(keys, results, strict=True):
            messages.add_neighbors(result, self.table.nearest(key, BUCKET_NODES, exclude=context.remote_id))
        return dht_pb2.FindResponse(results=results, peer=self.node_info)

    def _store(self, record: Record | None, sender: str, network: str) -> RecordProblem | None:
        if record is None:
            return RecordProblem.MALFORMED
        reserved = 0.0 if self.store.has_any_of(sender) else CHECK_BURST * KNOWN_OWNERS_SHARE
        if self._checks.left(None, time.monotonic()) - 1.0 < reserved:
            return RecordProblem.BUSY
        self._checks.take(None, 1.0, time.monotonic())
        if owner_of(record.subkey) != sender:
            return RecordProblem.WRONG_OWNER
        verdict = self.checker.check(record)
        if isinstance(verdict, RecordProblem):
            return verdict
        return None if self.store.store(record, sender, time.time(), network) else RecordProblem.NO_ROOM

    # What this node asks others. Where the swarm is private, errors of membership come from here too.

    async def call_ping(self, peer: PeerID, validate: bool = False, must_reach: bool = True) -> bool:
        """Whether the peer answers as a node of the DHT.

        With `validate`, raises `ClockDiffers` if clocks differ or, where it `must_reach` this node, if it cannot.
        """
        asked_at = time.time()
        request = dht_pb2.PingRequest(peer=self.node_info, validate=validate)
        try:
            with raise_dht_errors("a ping"):
                response = await self.get_stub(peer).rpc_ping(request, timeout=REQUEST_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("%s: %s", peer, error)
            self.table.failed(peer, time.monotonic())
            return False
        if validate:
            _require_same_clock(response.dht_time, asked_at, time.time())
            if must_reach and not self.is_client and not response.available:
                raise ClockDiffers(f"peer …{str(peer)[-6:]} cannot reach this node: a firewall may be in the way")
        self._heard_from(peer, response.peer)
        return bool(response.peer.node_id == node_id_of(peer))

    async def call_store(self, peer: PeerID, records: Sequence[Record]) -> list[bool]:
        """Which of this peer's own records the other one keeps now. Raises `DhtError`, `ProtocolViolation`."""
        request = messages.store_request(records, self.node_info)
        with self._blaming(peer), raise_dht_errors("storing a record"):
            response = await self.get_stub(peer).rpc_store(request, timeout=REQUEST_TIMEOUT_S)
            if len(response.store_ok) != len(records):
                raise ProtocolViolation("an answer of the DHT does not say which records were stored")
            self._heard_from(peer, response.peer)
            return list(response.store_ok)

    async def call_find(self, peer: PeerID, keys: Sequence[bytes]) -> Found:
        """What the peer knows about the keys. Invalid records are left out. Raises `DhtError`, `ProtocolViolation`."""
        request = messages.find_request(keys, self.node_info)
        with self._blaming(peer), raise_dht_errors("asking the DHT"):
            response = await self.get_stub(peer).rpc_find(request, timeout=REQUEST_TIMEOUT_S)
            if len(response.results) != len(keys):
                raise ProtocolViolation("an answer of the DHT is not one for each key")
            found, neighbors = {}, {}
            for key, result in zip(keys, response.results, strict=True):
                neighbors[key] = messages.neighbors_named(result)
                found[key] = messages.records_found(key, result)
            believed, all_over = await self._believed(found)
            self._heard_from(peer, response.peer)
            return Found(believed, neighbors, all_over)

    async def _believed(self, found: dict[bytes, list[Record]]) -> tuple[dict[bytes, list[tuple[str, Record]]], bool]:
        believed: dict[bytes, list[tuple[str, Record]]] = {key: [] for key in found}
        refused: Counter[RecordProblem] = Counter()
        for number, (key, record) in enumerate((key, record) for key, records in found.items() for record in records):
            verdict = self.checker.check(record)
            if isinstance(verdict, Accepted):
                believed[key].append((verdict.owner, record))
            else:
                self.observe_refusal(verdict)
                refused[verdict] += 1
                if refused.total() - refused[RecordProblem.LIFETIME] > MAX_BAD_RECORDS:
                    raise ProtocolViolation(f"an answer of the DHT has invalid records: {verdict}")
            if number % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)
        return believed, refused[RecordProblem.LIFETIME] > 0 and not any(believed.values())

    # Whom this node knows.

    def _meet(self, node: dht_pb2.NodeInfo, peer: PeerID) -> None:
        """A peer sent a request. If it says that it is a node, it may be asked from now on."""
        if not self.is_client:
            self._add(node, peer)

    def _heard_from(self, peer: PeerID, node: dht_pb2.NodeInfo) -> None:
        """A peer answered this node."""
        self.table.answered(peer)
        self._add(node, peer)

    def _add(self, node: dht_pb2.NodeInfo, peer: PeerID) -> None:
        if node.node_id == node_id_of(peer):
            self.table.add(peer)

    @contextmanager
    def _blaming(self, peer: PeerID) -> Iterator[None]:
        """An error is the peer's fault: it is not asked for a while, longer if it answered wrongly."""
        try:
            yield
        except ProtocolViolation:
            self.table.failed(peer, time.monotonic(), WRONG_SILENT_S)
            raise
        except SwarmError:
            self.table.failed(peer, time.monotonic())
            raise

    async def _ping_back(self, peer: PeerID) -> bool:
        if peer in self._pinging_back or len(self._pinging_back) >= MAX_PINGS_BACK:
            # Not "it cannot be reached", which would end the other one's attempts to join.
            raise RequestRefused("too many peers want to be pinged now; try again in a few seconds")
        self._pinging_back.add(peer)
        try:
            return await self.call_ping(peer)
        finally:
            self._pinging_back.discard(peer)

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _BoundedType:
    """A type of request, of which a message that is too long is not even parsed."""

    def __init__(self, request_type: Any, max_bytes: int) -> None:
        self._request_type = request_type
        self._max_bytes = max_bytes

    def FromString(self, data: bytes) -> Any:
        """As a protobuf type has it. Raises `RequestRefused`, `ProtocolViolation`."""
        if len(data) > self._max_bytes:
            raise RequestRefused(f"a request of {len(data)} bytes is too long; at most {self._max_bytes} are allowed")
        try:
            return self._request_type.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation(f"not a request to the DHT: {error}") from None


def _require_same_clock(theirs: float, asked_at: float, answered_at: float) -> None:
    """Raises `ClockDiffers`."""
    if theirs and not asked_at - MAX_CLOCK_DIFFERENCE_S <= theirs <= answered_at + MAX_CLOCK_DIFFERENCE_S:
        raise ClockDiffers(
            f"local time must be within {MAX_CLOCK_DIFFERENCE_S:.0f} seconds of others "
            f"(local: {answered_at:.1f}, peer: {theirs:.1f})"
        )
