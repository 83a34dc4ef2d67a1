"""The stream to one server of a route: it only sends, and hands over whatever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from swarm.client.wire.reply_checks import describe_hop
from swarm.common.weak_callback import weak_callback
from swarm.data_structures import Hop
from swarm.errors import PeerLost, PeerTimeout, ProtocolViolation, RemoteError, TooLargeReply
from swarm.protocol import messages
from swarm.transport.stream import Network, Stream

CLOSE_TIMEOUT_S = 1.0
"""Seconds that a server gets to read that a session is over."""

_listeners: set[asyncio.Task[None]] = set()
"""Strong references: asyncio keeps only weak ones. A session that is garbage-collected closes its streams itself."""


class HopStream:
    """Opens the stream, sends, listens to whatever comes, and closes.

    A task listens all the time, because answers come to steps that this client never sent: the server before may have
    pushed them.

    Args:
        network: this client's place in the network.
        hop: the server.
        on_message: called with each reply and its payload; what it raises ends the stream.
        on_lost: called with the error that ended the stream.
        max_reply_bytes: how large the payload of a reply may be now. All three are bound methods of the stream's
            owner, which the stream does not keep alive.
    """

    def __init__(
        self,
        network: Network,
        hop: Hop,
        on_message: Callable[[messages.ServerMessage, bytes | memoryview], None],
        on_lost: Callable[[Exception], None],
        max_reply_bytes: Callable[[], int],
    ) -> None:
        self._network = network
        self._hop = hop
        self._on_message = weak_callback(on_message, None)
        self._on_lost = weak_callback(on_lost, None)
        self._max_reply_bytes = weak_callback(max_reply_bytes, 0)
        self._stream: Stream | None = None
        self._listener: asyncio.Task[None] | None = None

    async def connect(self) -> Stream:
        """A new stream in the place of the old one, which only its opener reads until `listen`. Raises `PeerLost`."""
        self.hang_up()
        self._stream = await self._network.open_stream(self._hop.server.peer_id)
        return self._stream

    def listen(self) -> None:
        """Hand over all that comes from now on."""
        if self._stream is not None:
            self._listener = asyncio.get_running_loop().create_task(self._listen(self._stream))
            _listeners.add(self._listener)
            self._listener.add_done_callback(_listeners.discard)

    async def send(self, message: messages.Message, payload: bytes | memoryview, seconds: float) -> None:
        """Send a message, which the server has to read within `seconds`. Raises `PeerLost` or `PeerTimeout`."""
        if self._stream is None:
            raise PeerLost(f"{describe_hop(self._hop)} is not connected")
        try:
            await self._stream.send(message, payload, seconds)
        except PeerTimeout:
            raise PeerTimeout(f"{describe_hop(self._hop)} has read nothing for {seconds:.1f} s") from None
        except PeerLost as error:
            raise PeerLost(f"{describe_hop(self._hop)} is gone: {error}") from None

    async def close(self, drain: bool, keep: int = 0) -> None:
        """Tell the server that the session is over, if it can still be told, and hang up.

        Args:
            keep: positions that it may keep.
            drain: wait until the server has ended the stream. One that is still going to answer would fail to do so if
                the client had hung up, and with that fails the stream on which the farewell lies unread.
        """
        try:
            if self._stream is not None:
                with suppress(RemoteError, TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._stream.send(messages.CloseSession(keep))
                        if drain:
                            await self._drain(self._stream)
        finally:
            self.hang_up()

    async def _drain(self, stream: Stream) -> None:
        if self._listener is not None:
            await asyncio.wait({self._listener})
        else:  # the answer to the opening has not been read
            while True:
                await stream.receive(0)

    def hang_up(self) -> None:
        """End the connection without a word."""
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    async def _listen(self, stream: Stream) -> None:
        try:
            while True:
                try:
                    frame = await stream.receive(self._max_reply_bytes)
                except ProtocolViolation as error:
                    raise TooLargeReply(f"{describe_hop(self._hop)}: {error}") from None
                self._on_message(messages.decode_server(frame.header), frame.payload)
        except PeerLost as error:
            self._on_lost(PeerLost(f"{describe_hop(self._hop)} is gone: {error}"))
        except RemoteError as error:
            self._on_lost(error)
