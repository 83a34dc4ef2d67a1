"""Connections through the daemon, which the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr

from swarm.transport import daemon_streams
from swarm.transport.reach.circuit import encode
from tests.transport.reach.fakes import Writer, peer_id

PEER = PeerID.from_base58(peer_id("peer"))
ADDRESSES = [
    Multiaddr("/ip4/81.2.69.142/tcp/31337"),
    Multiaddr(f"/ip4/8.8.8.8/tcp/1/p2p/{peer_id('relay')}/p2p-circuit"),
]


class PlayedDaemon:
    """A daemon that answers every request in the same way.

    Attributes:
        requests: what it was asked.
        writer: the socket on which it was asked last.
    """

    def __init__(self, answer: bytes | None) -> None:
        self.requests: list[p2pd_pb2.Request] = []
        self.writer: Any = None
        self._answer = answer
        connector = SimpleNamespace(open_connection=self._open)
        self._client = SimpleNamespace(control=SimpleNamespace(daemon_connector=connector))

    async def _open(self) -> tuple[asyncio.StreamReader, Any]:
        reader, received = asyncio.StreamReader(), bytearray()

        def take(data: bytes) -> None:
            received.extend(data)
            length = received[0] & 0x7F | (received[1] << 7 if received[0] & 0x80 and len(received) > 1 else 0)
            head = 2 if received[0] & 0x80 else 1
            if len(received) >= head + length and length:
                self.requests.append(p2pd_pb2.Request.FromString(bytes(received[head:])))
                if self._answer is not None:
                    reader.feed_data(self._answer)
                    reader.feed_eof()

        self.writer = Socket(take)
        return reader, self.writer


class Socket(Writer):
    closed = False

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


OK = encode(p2pd_pb2.Response(type=p2pd_pb2.Response.OK))
ERROR = encode(p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="no")))


def test_the_daemon_is_asked_to_connect_at_these_addresses():
    async def scenario():
        daemon: Any = PlayedDaemon(OK)
        await daemon_streams.connect(daemon, PEER, ADDRESSES)
        (request,) = daemon.requests
        assert request.type == p2pd_pb2.Request.CONNECT
        assert request.connect.peer == PEER.to_bytes()
        assert [Multiaddr(one) for one in request.connect.addrs] == ADDRESSES
        assert daemon.writer.closed

    asyncio.run(scenario())


def test_a_daemon_that_does_not_connect():
    async def scenario():
        for answer, error in ((ERROR, P2PDaemonError), (OK[:-1], asyncio.IncompleteReadError)):
            daemon: Any = PlayedDaemon(answer)
            with pytest.raises(error):
                await daemon_streams.connect(daemon, PEER, ADDRESSES)
            assert daemon.writer.aborted

    asyncio.run(scenario())


def test_who_gives_up_waiting_leaves_no_socket_to_the_daemon():
    async def scenario():
        daemon: Any = PlayedDaemon(None)
        waiting = asyncio.ensure_future(daemon_streams.connect(daemon, PEER, ADDRESSES))
        while not daemon.requests:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert daemon.writer.aborted

    asyncio.run(scenario())
