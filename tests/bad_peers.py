"""Peers that misbehave: servers that lie in their answers or in what they push, and forgers of announcements.

A bad server is a real server, which looks better than all others and does everything right, but for one thing.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from swarm.client.threads.network_thread import NetworkThread
from swarm.data_structures import ServerInfo, WireFormat
from swarm.dht.server_records import encode_announcement, model_key
from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from swarm.transport.dht.records import Record, sign, subkey_of
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.stream import Stream
from tests.swarms import LOOPBACK, ServerProcess, TestSwarm

ATTRACTIVE = 1e6
"""Announced blocks per second of a bad server."""

FROM_STEP = 3
"""The first step at which a bad server misbehaves: by then clients have come to trust it."""

STALLED = 3.0
"""Seconds after which a server that takes no more of a stream stands still there."""

Bytes = bytes | memoryview
Sent = tuple[messages.Message, Bytes] | None
"""What is sent instead of a message; None is nothing at all."""

Lie = Callable[[messages.Message, Bytes], Sent]


def nan(message: messages.Message, payload: Bytes) -> Sent:
    return message, np.full(len(payload) // 4, np.nan, dtype=np.float32).tobytes()


def one_infinity(message: messages.Message, payload: Bytes) -> Sent:
    values = np.frombuffer(payload, dtype=np.float32).copy()
    values[-1] = np.inf
    return message, values.tobytes()


def half(message: messages.Message, payload: Bytes) -> Sent:
    return message, payload[: len(payload) // 2]


def ten_megabytes(message: messages.Message, payload: Bytes) -> Sent:
    return message, bytes(10 << 20)


def nothing(message: messages.Message, payload: Bytes) -> Sent:
    return None


def wrong_step(message: messages.Message, payload: Bytes) -> Sent:
    return msgspec.structs.replace(message, step=message.step + 7), payload  # type: ignore[attr-defined]


def unknown_format(message: messages.Message, payload: Bytes) -> Sent:
    return msgspec.structs.replace(message, dtype="float17"), payload


class LyingStream:
    """A stream on which some messages are replaced when they are sent.

    Args:
        applies: which messages are.
    """

    def __init__(self, stream: Stream, lie: Lie, applies: Callable[[messages.Message], bool]) -> None:
        self.peer_id = stream.peer_id
        self.receive = stream.receive
        self.close = stream.close
        self._stream = stream
        self._lie = lie
        self._applies = applies

    async def send(self, message: messages.Message, payload: Bytes = b"", timeout_s: float | None = None) -> None:
        sent: Sent = (message, payload)
        if self._applies(message):
            sent = self._lie(message, payload)
        if sent is not None:
            await self._stream.send(*sent, timeout_s)


def is_reply(message: messages.Message) -> bool:
    return isinstance(message, messages.StepReply) and message.step >= FROM_STEP


def is_push(message: messages.Message) -> bool:
    return isinstance(message, messages.PushRequest) and message.step.step >= FROM_STEP


def is_output(message: messages.Message) -> bool:
    return is_reply(message) or is_push(message)


class LyingPeer:
    """A peer, or another network, that opens lying streams.

    Args:
        wrap: makes a stream one that lies.
    """

    def __init__(self, peer: Any, wrap: Callable[[Any], Any]) -> None:
        self._peer = peer
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    async def open_stream(self, peer_id: str) -> Any:
        return self._wrap(await self._peer.open_stream(peer_id))


class BadServer(Server):
    """A server that lies on its streams, those that it opens and those that it accepts; see `LyingPeer`."""

    def __init__(self, config: ServerConfig, wrap: Callable[[Any], Any]) -> None:
        super().__init__(config)
        self._wrap = wrap

    @property
    def peer(self) -> Any:
        return LyingPeer(super().peer, self._wrap)

    async def _dispatch(self, stream: Stream) -> None:
        await super()._dispatch(self._wrap(stream))


class FraudServer(Server):
    """A server that announces something else than it does."""

    def __init__(self, config: ServerConfig, claims: dict[str, Any]) -> None:
        super().__init__(config)
        self._claims = claims

    def _announcement(self, config: Any) -> ServerInfo:
        return replace(super()._announcement(config), **self._claims)


def start_fraud(swarm: TestSwarm, blocks: str, claims: dict[str, Any], **options: Any) -> ServerProcess:
    """A process that looks like the best server for these blocks, and is another one."""
    make = functools.partial(FraudServer, claims=claims)
    return swarm.start(blocks, make=make, **{"throughput": ATTRACTIVE, **options}).wait_ready()


def start_bad_server(
    swarm: TestSwarm, blocks: str, lie: Lie, applies: Callable[[messages.Message], bool] = is_reply, **options: Any
) -> ServerProcess:
    """A process that looks like the best server for these blocks."""
    make = functools.partial(BadServer, wrap=functools.partial(LyingStream, lie=lie, applies=applies))
    return swarm.start(blocks, make=make, **{"throughput": ATTRACTIVE, "dtype": "float32", **options}).wait_ready()


class Anything:
    """Rules of a DHT that lets everything pass."""

    def check(self, key: bytes, owner: str, payload: bytes) -> None:
        return None


@dataclass(frozen=True)
class Stored:
    """A record as a forger stores it.

    Attributes:
        value: the announcement.
        owner: the private key whose public part is in the record's subkey; None for a subkey without a key.
        signer: the private key that signs; None leaves it unsigned.
        lifetime: seconds until it expires.
    """

    value: bytes
    owner: RSAPrivateKey | None
    signer: RSAPrivateKey | None
    lifetime: float = 20.0

    def record(self, name: str) -> Record:
        """The record under the key `name`."""
        expires = time.time() + self.lifetime
        signed = sign(name, self.value, expires, self.signer or RSAPrivateKey.process_wide())
        subkey = subkey_of(self.owner) if self.owner is not None else b"anybody"
        value = signed.value
        if self.signer is None:
            value = msgspec.msgpack.encode(self.value)
        elif self.signer is not self.owner:  # its signature, over the owner's subkey
            signature = self.signer.sign(
                MSGPackSerializer.dumps(
                    (signed.key, msgspec.msgpack.encode(subkey), msgspec.msgpack.encode(self.value), expires)
                )
            )
            value = msgspec.msgpack.encode(self.value) + b"[signature:" + signature + b"]"
        return replace(signed, subkey=subkey, value=value)


class Forger:
    """A peer of the DHT that holds forged records itself, answers with them, and stores them at all others it can."""

    def __init__(self, peer: Peer, background: NetworkThread, model: str) -> None:
        self.peer_id = peer.peer_id
        self.key = peer.identity.private_key
        self._model = model
        self._peer = peer
        self._background = background

    def info(self, honest: ServerInfo, **changes: Any) -> ServerInfo:
        """An announcement of this peer, which would be believed but for the changes."""
        return replace(honest, peer_id=self.peer_id, **{"throughput": ATTRACTIVE, "name": "forged", **changes})

    def own(self, info: ServerInfo) -> Stored:
        """As an honest server would store it."""
        return Stored(encode_announcement(self._model, info), self.key, self.key)

    def store(self, model: str, block: int, stored: Stored, peers: list[str]) -> list[bool]:
        """Put the record under the key of the block; which of the peers took it."""
        return self._background.run(self._store(model_key(model, block), stored, peers))

    async def _store(self, name: str, stored: Stored, peers: list[str]) -> list[bool]:
        record = stored.record(name)
        protocol = self._peer.dht.protocol
        protocol.store.store(record, self.peer_id, time.time())
        taken = []
        for peer in peers:
            taken += await protocol.call_store(PeerID.from_base58(peer), [record])
        return taken


@contextmanager
def run_peer(swarm: TestSwarm) -> Iterator[tuple[Peer, NetworkThread]]:
    """A peer that has joined the swarm, with a libp2p daemon of its own, and the loop that it lives in."""
    background = NetworkThread()
    try:
        peer = background.run(Peer.create(P2PConfig(swarm.addresses, LOOPBACK), Anything()))
        try:
            yield peer, background
        finally:
            background.run(peer.shutdown())
    finally:
        background.close()


@contextmanager
def run_forger(swarm: TestSwarm) -> Iterator[Forger]:
    """A forger that has joined the swarm."""
    with run_peer(swarm) as (peer, background):
        yield Forger(peer, background, Path(swarm.model).name)


class GreedyClient:
    """A client, by hand, of the server `info`, that takes whatever it can get."""

    def __init__(self, peer: Peer, background: NetworkThread, info: ServerInfo) -> None:
        self._peer = peer
        self._background = background
        self._info = info
        self._streams: list[Stream] = []

    def ask(self, streams: int, requests: int, hidden_TH: np.ndarray, *, reads: bool = False) -> int:
        """Ask for forwards on so many streams at once; how many requests the server has taken.

        Args:
            reads: read each answer before the next request; else read none.
        """
        return sum(self._background.run(self._ask_on_all(streams, requests, hidden_TH, reads)))

    async def _ask_on_all(self, streams: int, requests: int, hidden_TH: np.ndarray, reads: bool) -> list[int]:
        opened = [await self._peer.open_stream(self._info.peer_id) for _ in range(streams)]
        self._streams += opened
        return await asyncio.gather(*(self._ask(stream, requests, hidden_TH, reads) for stream in opened))

    async def _ask(self, stream: Stream, requests: int, hidden_TH: np.ndarray, reads: bool) -> int:
        info, wire = self._info, WireFormat.NONE
        rows = [len(hidden_TH) // 4] * 4
        forward = messages.ForwardRequest(
            info.revision, info.span.start, info.span.end, rows, wire, info.compute_dtype, wire
        )
        for number in range(requests):
            try:
                async with asyncio.timeout(STALLED):
                    await stream.send(forward, hidden_TH.tobytes())
            except TimeoutError:
                return number
            if reads:
                await stream.receive()
        return requests

    def answers(self) -> list[int]:
        """Read at last: how many answers there are on each stream before it ends."""
        return self._background.run(self._read_all())

    async def _read_all(self) -> list[int]:
        async def read(stream: Stream) -> int:
            count = 0
            with suppress(PeerLost):
                while True:
                    await stream.receive()
                    count += 1
            return count

        async with asyncio.timeout(60):
            return await asyncio.gather(*map(read, self._streams))
