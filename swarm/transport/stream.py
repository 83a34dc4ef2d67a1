"""A two-way stream of frames between two peers, over any pair of asyncio reader and writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from swarm.errors import PeerLost
from swarm.protocol.framing import MAX_PAYLOAD, PREFIX_LENGTH, Frame, decode_prefix, encode_prefix
from swarm.protocol.messages import Message, encode

JOINED = 1 << 16
"""Payloads up to this size are copied behind their header: a second write would wake every process on the way twice."""


Limit = int | Callable[[], int]
"""Bytes that a payload may have; a function is asked when the frame comes, not when the waiting begins."""


class Stream(Protocol):
    """What the rooms above see of a connection. Several may be open between the same two peers."""

    peer_id: str

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send one frame. Raises `PeerLost`."""

    async def receive(self, max_payload: Limit = MAX_PAYLOAD) -> Frame:
        """Wait for one frame. Raises `PeerLost` at the end of the stream, `ProtocolViolation` when it is too large."""

    async def discard(self) -> None:
        """Throw away what comes, until the other side closes."""

    def close(self) -> None:
        """Close the stream once all is sent; the other side's `receive` raises `PeerLost`."""

    def abort(self) -> None:
        """Close the stream at once. To a peer that does not read, `close` would keep what is unsent until it does."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """What a room above needs of the network: streams to others, streams from others."""

    peer_id: str

    async def open_stream(self, peer_id: str) -> Stream:
        """Connect to a peer. Raises `PeerLost` if it cannot be reached."""

    async def serve(self, handler: StreamHandler) -> None:
        """Call `handler` for every stream that another peer opens."""


class FrameStream:
    """`Stream` over an asyncio reader and writer (a socket to the libp2p daemon, or a pair in memory)."""

    def __init__(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peer_id = peer_id
        self._reader = reader
        self._writer = writer

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        header = encode(message)
        head = encode_prefix(len(header), len(payload)) + header
        try:
            if len(payload) <= JOINED:
                self._writer.write(b"".join((head, payload)))
            else:
                self._writer.write(head)
                self._writer.write(payload)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a closed transport
            raise PeerLost(f"the connection to peer …{self.peer_id[-6:]} broke: {error}") from None

    async def receive(self, max_payload: Limit = MAX_PAYLOAD) -> Frame:
        try:
            prefix = await self._reader.readexactly(PREFIX_LENGTH)
            limit = max_payload if isinstance(max_payload, int) else max_payload()
            header_length, payload_length = decode_prefix(prefix, limit)
            body = await self._reader.readexactly(header_length + payload_length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerLost(f"peer …{self.peer_id[-6:]} closed the connection: {error}") from None
        return Frame(body[:header_length], memoryview(body)[header_length:])

    async def discard(self) -> None:
        with suppress(OSError):
            while await self._reader.read(JOINED):
                pass

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()
