"""A two-way stream of frames between two peers, over any pair of asyncio reader and writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from swarm.errors import PeerLost, PeerTimeout
from swarm.protocol.framing import MAX_PAYLOAD_BYTES, PREFIX_BYTES, Frame, decode_prefix, encode_prefix
from swarm.protocol.messages import Message, encode

if TYPE_CHECKING:
    from swarm.transport.identity import Signature

MAX_COALESCED_BYTES = 1 << 16
"""Payloads up to this size are sent in one write with their header. Two writes would wake every process on the way
twice."""

UNWATCHED_BYTES = 1 << 14
"""With no more to send, asyncio does not wait (its low-water mark), so that no timer is needed. One takes 20 µs, and
five times that with a cold cache."""

FRAME_TIMEOUT_S = 10.0
MIN_RECEIVED_BYTES_PER_S = 1 << 12
"""Once a frame has begun, its header must arrive within `FRAME_TIMEOUT_S` seconds, and its payload within that time
plus its length divided by this rate: a slower sender would keep memory that others could use. Lanes send their prompts
all at once, and an uplink of 0.5 Mbit/s, which a slow home has, carries fifteen streams at this rate."""

AdmitFrame = Callable[[bytes, int], Awaitable[None]]
"""Called with a frame's header and the length of its payload, before the payload is read."""

PayloadLimit = int | Callable[[], int]
"""Largest payload in bytes. A function is called when the frame arrives, not when the waiting starts."""


class Stream(Protocol):
    """A two-way stream of frames to another peer. Several may be open between the same two peers."""

    peer_id: str

    async def send(self, message: Message, payload: bytes | memoryview = b"", timeout_s: float | None = None) -> None:
        """Send one frame. Raises `PeerLost`, or `PeerTimeout` if the peer has not read enough after `timeout_s`."""

    async def receive(self, max_payload: PayloadLimit = MAX_PAYLOAD_BYTES, admit: AdmitFrame | None = None) -> Frame:
        """Wait for one frame. Raises `PeerLost` at the end of the stream, `ProtocolViolation` if it is too large.

        With `admit`, the payload is read once `admit` has returned; an error that it raises ends the stream. A frame
        that has begun must then also arrive in time (`MIN_RECEIVED_BYTES_PER_S`), else `PeerTimeout` is raised.
        """

    async def discard_incoming(self) -> None:
        """Read and discard everything until the other side closes the stream."""

    def close(self) -> None:
        """Close the stream after everything written is sent. The other side's `receive` then raises `PeerLost`."""

    def abort(self) -> None:
        """Close the stream at once. If the other peer does not read, `close` would keep unsent data in memory."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """The network as this peer sees it: it opens streams to other peers and serves the streams that they open."""

    peer_id: str

    async def open_stream(self, peer_id: str) -> Stream:
        """Connect to a peer. Raises `PeerLost` if it cannot be reached."""

    async def serve(self, handler: StreamHandler) -> None:
        """Call `handler` for every stream that another peer opens."""

    def knows(self, peer_id: str) -> bool:
        """Whether this peer has been in touch with another one lately, so that reaching it costs little."""

    def sign(self, data: bytes) -> Signature:
        """This peer's signature of some bytes."""


class FrameStream:
    """`Stream` over an asyncio reader and writer: a socket to the libp2p daemon, or a pair of queues in memory."""

    def __init__(self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peer_id = peer_id
        self._reader = reader
        self._writer = writer
        self._is_late = False

    async def send(self, message: Message, payload: bytes | memoryview = b"", timeout_s: float | None = None) -> None:
        header = encode(message)
        head = encode_prefix(len(header), len(payload)) + header
        try:
            if len(payload) <= MAX_COALESCED_BYTES:
                self._writer.write(b"".join((head, payload)))
            else:
                self._writer.write(head)
                self._writer.write(payload)
            if timeout_s is None or self._writer.transport.get_write_buffer_size() <= UNWATCHED_BYTES:
                await self._writer.drain()
            else:
                await self._drain_within(timeout_s)
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a closed transport
            raise PeerLost(f"the connection to peer …{self.peer_id[-6:]} broke: {error}") from None

    async def _drain_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise PeerTimeout(f"peer …{self.peer_id[-6:]} has not read what it was sent for {seconds:.1f} s") from None

    async def receive(self, max_payload: PayloadLimit = MAX_PAYLOAD_BYTES, admit: AdmitFrame | None = None) -> Frame:
        try:
            prefix = await self._reader.readexactly(PREFIX_BYTES)
            limit = max_payload if isinstance(max_payload, int) else max_payload()
            header_length, payload_length = decode_prefix(prefix, limit)
            if admit is not None:
                return await self._receive_admitted(header_length, payload_length, admit)
            body = await self._reader.readexactly(header_length + payload_length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerLost(f"peer …{self.peer_id[-6:]} closed the connection: {error}") from None
        return Frame(body[:header_length], memoryview(body)[header_length:])

    async def _receive_admitted(self, header_length: int, payload_length: int, admit: AdmitFrame) -> Frame:
        # Not `asyncio.timeout`, which takes 20 µs: as much as all the rest.
        timer = self._abort_after(FRAME_TIMEOUT_S)
        try:
            header = await self._reader.readexactly(header_length)
            timer.cancel()
            await admit(header, payload_length)
            timer = self._abort_after(FRAME_TIMEOUT_S + payload_length / MIN_RECEIVED_BYTES_PER_S)
            return Frame(header, memoryview(await self._reader.readexactly(payload_length)))
        except (asyncio.IncompleteReadError, OSError):
            if not self._is_late:
                raise
            raise PeerTimeout(
                f"peer …{self.peer_id[-6:]} sent less than {MIN_RECEIVED_BYTES_PER_S} bytes/s of a frame of "
                f"{payload_length} bytes; it may try again over a quicker link, or send smaller ones"
            ) from None
        finally:
            timer.cancel()

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        """Abort the stream unless the timer is canceled before; a reader then sees the stream's end."""

        def abort() -> None:
            self._is_late = True
            self.abort()

        return asyncio.get_running_loop().call_later(seconds, abort)

    async def discard_incoming(self) -> None:
        with suppress(OSError):
            while await self._reader.read(MAX_COALESCED_BYTES):
                pass

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()
