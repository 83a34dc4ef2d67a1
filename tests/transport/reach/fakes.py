"""A peer's daemon, the relays around it and its dialer, in memory."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.transport import daemon_streams
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID, RESERVE, HopMessage, encode
from swarm.transport.reach.heartbeat import PING_BYTES, PING_PROTOCOL_ID
from swarm.transport.reach.relay_choice import Relay
from tests.memory_hub import stream_pair


def peer_id(name: str) -> str:
    """A valid peer id."""
    return PeerID(bytes.fromhex("1220") + hashlib.sha256(name.encode()).digest()).to_base58()


async def no_distance(peer_id: str) -> float:
    """The round trip to a peer next door."""
    return 0.0


def grant(expire: int, **fields: object) -> Any:
    """A relay's answer that grants a place until then."""
    limit = {"duration": 86400, "data": 1 << 36}
    return HopMessage(type=2, status=100, reservation={"expire": expire, **fields}, limit=limit)


def refuse(status: int) -> Any:
    """A relay's answer that grants no place."""
    return HopMessage(type=2, status=status)


class Writer:
    """The writing end of a stream: what is written goes to `answer`, which feeds the reading end."""

    def __init__(self, answer: Callable[[bytes], None]) -> None:
        self.aborted = False
        self._answer = answer

    @property
    def transport(self) -> Writer:
        return self

    def write(self, data: bytes) -> None:
        self._answer(data)

    def abort(self) -> None:
        self.aborted = True


class FakeRelay:
    """A peer that relays, as the daemon of another one sees it.

    Attributes:
        is_up: whether it can be connected to.
        is_silent: whether it says nothing any more, as behind a router that has forgotten the connection.
        seconds: for how long it grants a place.
        status: what it answers instead, if not 100.
        is_private: whether it has still to learn that the other peer is a member.
        raw: bytes that it answers instead, with their length.
        carries: whether connections through it arrive.
        echo: what it makes of a ping, or None if it says nothing.
        listed: addresses under which the daemon knows it once it is connected.
        reserved: how often it was asked for a place.
        pinged: what it sends on the streams on which it is pinged.
    """

    def __init__(self, name: str, address: str, is_bootstrap: bool = False) -> None:
        self.known = Relay(peer_id(name), address, is_bootstrap)
        self.is_up = True
        self.is_silent = False
        self.seconds = 3600
        self.status = 100
        self.is_private = False
        self.raw: bytes | None = None
        self.carries = True
        self.echo: Callable[[bytes], bytes] | None = bytes
        self.listed: list[str] = [address]
        self.reserved = 0
        self.pinged: list[asyncio.StreamReader] = []

    @property
    def id(self) -> str:
        return self.known.peer_id

    def hang_up(self) -> None:
        """End its connections."""
        for reader in self.pinged:
            reader.feed_eof()
        self.pinged.clear()

    def go_down(self) -> None:
        """End, as a process does."""
        self.is_up = False
        self.hang_up()

    def answer_reserve(self) -> bytes:
        self.reserved += 1
        if self.raw is not None:
            return self.raw
        status = 202 if self.is_private else self.status
        return encode(grant(int(time.time()) + self.seconds) if status == 100 else refuse(status))


class FakeNetwork:
    """The daemon of the peer "home", its dialer, and the relays that they know.

    It stands in for `P2P` and for `Dialer`.

    Attributes:
        relays: by peer id.
        own: addresses that the daemon says it listens at.
        connected: who the daemon has a connection to.
        disconnected: who it was told to disconnect from, in order.
        writers: of all streams that were opened.
        forgotten: relays that were told to forget their connections, in order.
        proofs: addresses that the dialer has dialed, in order.
        patience: how long each of them was given to answer.
        closed: whether the dialer was closed.
    """

    def __init__(self, *relays: FakeRelay, own: Sequence[str] = ()) -> None:
        self.peer_id = PeerID.from_base58(peer_id("home"))
        self.relays = {relay.id: relay for relay in relays}
        self.own = list(own)
        self.connected: set[str] = set()
        self.disconnected: list[str] = []
        self.writers: list[Writer] = []
        self.forgotten: list[str] = []
        self.proofs: list[str] = []
        self.patience: list[float] = []
        self._last_ping: tuple[asyncio.StreamReader, bytes]
        self._forgetting: set[asyncio.Task[None]] = set()
        self.closed = False
        self._client = SimpleNamespace(disconnect=self.disconnect, identify=self.identify)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Have all streams opened here. Returns itself, as anything."""
        monkeypatch.setattr(daemon_streams, "open_stream", self.open_stream)
        monkeypatch.setattr(daemon_streams, "connect", self.connect)
        return self

    async def open_stream(self, p2p: Any, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, Any]:
        relay = self.relays[peer.to_base58()]
        if relay.id not in self.connected or not (relay.is_up or relay.is_silent):
            raise P2PDaemonError("no addresses")
        reader = asyncio.StreamReader()

        def answer(data: bytes) -> None:
            if relay.is_silent:
                return
            if protocol == PING_PROTOCOL_ID:
                assert len(data) == PING_BYTES
                self._last_ping = reader, data
                if relay.echo is not None:
                    reader.feed_data(relay.echo(data))
                return
            assert (protocol, data) == (RELAY_PROTOCOL_ID, encode(HopMessage(type=RESERVE)))
            reader.feed_data(relay.answer_reserve())
            reader.feed_eof()

        if protocol == PING_PROTOCOL_ID:
            relay.pinged.append(reader)
        self.writers.append(Writer(answer))
        return reader, self.writers[-1]

    def echo_late(self) -> None:
        """Have the relay that was pinged last answer now."""
        reader, data = self._last_ping
        reader.feed_data(data)

    async def connect(self, p2p: Any, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
        relay = self.relays.get(peer.to_base58())
        if relay is None:
            raise P2PDaemonError("all dials failed")
        if relay.is_silent:
            await asyncio.Event().wait()
        if not relay.is_up or relay.known.address not in map(str, addresses):
            raise P2PDaemonError("all dials failed")
        self.connected.add(relay.id)

    async def disconnect(self, peer: PeerID) -> None:
        self.connected.discard(peer.to_base58())
        self.disconnected.append(peer.to_base58())
        if peer.to_base58() in self.relays:
            self.relays[peer.to_base58()].hang_up()

    async def open_notice(self, peer: str) -> Any:
        """A stream for messages about reachability: the relay forgets the connections to who asks for that."""
        relay = self.relays[peer]
        if peer not in self.connected or not relay.is_up or relay.is_silent:
            raise PeerLost("it cannot be reached")
        ours, theirs = stream_pair("home", peer)
        task = asyncio.ensure_future(self._forget(peer, theirs))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        return ours

    async def _forget(self, peer: str, stream: Any) -> None:
        message = messages.decode_reachability((await stream.receive(0)).header)
        if isinstance(message, messages.DialBackRequest):  # on a stream that only members can open
            self.relays[peer].is_private = False
            await stream.send(messages.DialBackReply("81.2.69.142", []))
        else:
            assert message == messages.ForgetConnections()
            self.forgotten.append(peer)
        stream.close()

    async def list_peers(self) -> list[Any]:
        return [
            SimpleNamespace(peer_id=PeerID.from_base58(one), addrs=list(map(Multiaddr, self.relays[one].listed)))
            for one in sorted(self.connected)
        ]

    async def identify(self) -> tuple[PeerID, list[Multiaddr]]:
        return self.peer_id, list(map(Multiaddr, self.own))

    async def dial(self, target: str, address: str, timeout_s: float = 0.0) -> None:
        self.proofs.append(address)
        self.patience.append(timeout_s)
        assert target == self.peer_id.to_base58()
        relay = next(one for one in self.relays.values() if f"/p2p/{one.id}/p2p-circuit" in address)
        if not relay.carries:
            raise PeerLost("nobody answers there")

    async def close(self) -> None:
        self.closed = True
