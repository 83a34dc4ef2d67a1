"""Nodes of the DHT that ask, store and answer what they should not."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import ClassVar
from unittest.mock import patch

from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

from swarm import errors
from swarm.data_structures import ServerState
from swarm.dht.directory import fetch_servers
from swarm.dht.server_records import model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.dht.node import LOOKUP_TIMEOUT_S
from swarm.transport.dht.protocol import REQUEST_TIMEOUT_S, DhtProtocol
from swarm.transport.dht.records import Record, key_bytes
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer
from tests.fuzz.dht_messages import DhtMessages, Stranger, wrongly_stored
from tests.fuzz.kinds import Kind, Violation, gather_all
from tests.fuzz.targets import Targets
from tests.infos import server_info

STRANGERS = 3
BATCH = 120
ANSWERS = 60
AT_ONCE = 12
ANSWER_LIMIT_S = 30.0
"""A node that takes longer hangs: on a busy machine it may take seconds."""

GRACE_S = 2.0

READ_LIMIT_S = LOOKUP_TIMEOUT_S + ANSWER_LIMIT_S
JITTER_S = 0.02
ERROR_NAME = re.compile(r"[A-Za-z]\w*")


class Dht(Kind):
    """A few hostile nodes, and an honest reader.

    Most batches are requests to one node of the swarm. In the others the reader, or a node of the swarm, asks a hostile
    node. After each batch the node has to answer the reader, who has to find all servers.
    """

    name: ClassVar[str] = "dht"
    share: ClassVar[int] = 15

    async def open(self, targets: Targets) -> None:
        self._targets = targets
        self._stack = AsyncExitStack()
        self._model = targets.model_folder.resolve().name
        self._nodes: list[PeerID] = [PeerID.from_base58(server.peer_id) for server in targets.servers]
        self._nodes += [PeerID.from_base58(one.rpartition("/p2p/")[2]) for one in targets.bootstrap_addresses]
        self._hostile = [await self._join(listen=True) for _ in range(STRANGERS)]
        self._reader = await self._join(listen=False)
        self._strangers = [self._stranger(peer) for peer in self._hostile]
        self._handlers = self._hostile[0].dht.p2p._client.control.unary_handlers
        self._honest = await self._read_honest()

    async def _join(self, listen: bool) -> Peer:
        hosts = ("/ip4/127.0.0.1/tcp/0",) if listen else ()
        peer = await join_network(P2PConfig(self._targets.bootstrap_addresses, hosts), AnnouncementValidator())
        self._stack.push_async_callback(peer.shutdown)
        return peer

    def _stranger(self, peer: Peer) -> Stranger:
        """It is offline, so that nobody takes it for a server: that is for other kinds."""
        info = server_info(0, self._targets.blocks, peer.peer_id, state=ServerState.OFFLINE, digests=())
        return Stranger(PeerID.from_base58(peer.peer_id), peer.identity.private_key, info)

    async def _read_honest(self) -> list[Record]:
        names = [model_key(self._model, server.start) for server in self._targets.servers]
        found = await self._reader.dht.protocol.call_find(self._nodes[0], [key_bytes(name) for name in names])
        return [record for records in found.records.values() for _, record in records]

    async def close(self) -> None:
        await self._stack.aclose()

    async def send(self, random: random.Random) -> int:
        messages = DhtMessages(random, self._strangers, self._model, self._targets.blocks, self._honest)
        node = random.choice(self._nodes)
        play = random.choices([self._ask, self._answer_reader, self._answer_late], [8, 3, 1])[0]
        count = await play(messages, node, random)
        await self._require_honest(node)
        return count

    # What a batch is.

    async def _ask(self, messages: DhtMessages, node: PeerID, random: random.Random) -> int:
        """Requests to one node. Some are given up at once, or a moment later."""
        requests = [messages.request() for _ in range(BATCH)]
        patience = [random.choice([0.0, 0.001, 0.01]) if random.random() < 0.1 else ANSWER_LIMIT_S for _ in requests]
        for first in range(0, BATCH, AT_ONCE):
            part = slice(first, first + AT_ONCE)
            exchanges = zip(requests[part], patience[part], strict=True)
            await gather_all(self._exchange(node, *request, limit_s) for request, limit_s in exchanges)
        return BATCH

    async def _exchange(self, node: PeerID, method: str, data: bytes, limit_s: float) -> None:
        client = self._hostile[0].dht.p2p._client
        try:
            async with asyncio.timeout(limit_s):
                answer = await client.call_unary_handler(node, _name(method), data)
        except TimeoutError:
            if limit_s == ANSWER_LIMIT_S:
                raise Violation(f"{node} did not answer {method} of {len(data)} bytes in {limit_s:.0f} s") from None
            self.outcomes["given up"] += 1
        except P2PHandlerError as error:
            self._count_refusal(str(error))
        except P2PDaemonError:
            self.outcomes["not carried"] += 1
        else:
            self._judge(method, data, answer)

    def _count_refusal(self, text: str) -> None:
        """hivemind sends the error as Python writes it."""
        name = ERROR_NAME.match(text)
        kind = getattr(errors, name[0], None) if name is not None else None
        if not (isinstance(kind, type) and issubclass(kind, errors.SwarmError)):
            raise Violation(f"a node answered with an error that is none of the project's: {text[:200]}")
        self.outcomes[kind.__name__] += 1

    def _judge(self, method: str, data: bytes, answer: bytes) -> None:
        if method != "rpc_store":
            self.outcomes["answered"] += 1
            return
        stored = list(dht_pb2.StoreResponse.FromString(answer).store_ok)
        self.outcomes["stored" if any(stored) else "not stored"] += 1
        if why := wrongly_stored(data, stored, self._strangers[0]):
            raise Violation(f"a record was stored, although {why}: {data.hex()[:400]}")

    async def _answer_reader(self, messages: DhtMessages, node: PeerID, random: random.Random) -> int:
        """Answers to a reader that asks a hostile node, each of which it has to understand or to refuse."""
        keys = [[key_bytes(model_key(self._model, block)) for block in range(count)] for count in (1, 2, 12)]
        protocol, hostile = self._reader.dht.protocol, PeerID.from_base58(self._hostile[0].peer_id)

        async def answer(data: bytes, sender: object) -> bytes:
            return messages.answer(dht_pb2.FindRequest.FromString(data).keys)

        async def ask() -> None:
            asking = asyncio.create_task(protocol.call_find(hostile, random.choice(keys)))
            await asyncio.wait({asking}, timeout=ANSWER_LIMIT_S)
            # If this process itself stood still, both times were up, and the reader ends a moment later.
            await asyncio.wait({asking}, timeout=GRACE_S)
            if not asking.done():
                where = " < ".join(str(frame.f_code) for frame in reversed(asking.get_stack()))
                asking.cancel()
                raise Violation(f"a reader waits for ever for a hostile node, in {where}")
            try:
                asking.result()
                self.outcomes["believed"] += 1
            except errors.SwarmError as error:
                self.outcomes[type(error).__name__] += 1

        with patch.dict(self._handlers, {_name("rpc_find"): answer}):
            for _ in range(ANSWERS // 4):
                await gather_all(ask() for _ in range(4))
        return ANSWERS

    async def _answer_late(self, messages: DhtMessages, node: PeerID, random: random.Random) -> int:
        """A hostile node lets a node of the swarm, and the reader, call it, and answers just when their time is up."""
        protocol, hostile = self._reader.dht.protocol, PeerID.from_base58(self._hostile[0].peer_id)

        async def late(data: bytes, sender: object) -> bytes:
            await asyncio.sleep(REQUEST_TIMEOUT_S + random.uniform(-JITTER_S, JITTER_S))
            return bytes(dht_pb2.PingResponse(peer=self._hostile[0].dht.protocol.node_info).SerializeToString())

        request = dht_pb2.PingRequest(peer=self._hostile[0].dht.protocol.node_info, validate=True)
        with patch.dict(self._handlers, {_name("rpc_ping"): late}):
            asked = [self._exchange(node, "rpc_ping", request.SerializeToString(), ANSWER_LIMIT_S)]
            asked += [_ignore_result(protocol.call_ping(hostile)) for _ in range(ANSWERS - 1)]
            await gather_all(asked)
        return ANSWERS

    # What has to hold.

    async def _require_honest(self, node: PeerID) -> None:
        """The node answers, and a reader finds all servers."""
        deadline = time.monotonic() + READ_LIMIT_S
        missing = {server.peer_id for server in self._targets.servers}
        while missing:
            if time.monotonic() > deadline:
                raise Violation(f"a reader does not find servers any more: {sorted(missing)}")
            try:
                async with asyncio.timeout(READ_LIMIT_S):
                    await self._reader.dht.protocol.call_find(node, [key_bytes(model_key(self._model, 0))])
                    found = await fetch_servers(self._reader.dht, self._model, self._targets.blocks)
            except TimeoutError:
                raise Violation(f"a search, or an honest request to {node}, does not end") from None
            except errors.DhtError as error:  # the machine may be busy for a moment
                self.outcomes[f"reader: {type(error).__name__}"] += 1
                await asyncio.sleep(1.0)
                continue
            missing -= {info.peer_id for info in found if info.state is ServerState.ONLINE}


def _name(method: str) -> str:
    return DhtProtocol._get_handle_name(None, method)


async def _ignore_result(call: Awaitable[object]) -> None:
    await call
