"""A stream to a peer that may not read what it is sent: frames are sent one at a time and have deadlines.

Without the deadlines, a client that reads nothing could keep its handler, and with it the blocks, in memory for ever.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swarm.errors import PeerLost, PeerTimeout, RemoteError
from swarm.protocol.framing import MAX_PAYLOAD_BYTES, Frame
from swarm.protocol.messages import Message
from swarm.server.sessions.push_link import MIN_BYTES_PER_S, PUSH_TIMEOUT_S
from swarm.transport.stream import AdmitFrame, PayloadLimit, Stream

DISCARD_TIMEOUT_S = 2.0
"""How long a peer gets to read why it is refused."""

REFUSED_PAYLOAD_TIMEOUT_S = 60.0
"""The same while it sends what will not be read. Many clients listen only once they have sent all; to one that is cut
off before, this server is gone."""


class ReplyStream:
    """A peer's stream, as the task that serves it sees it. Made in that task, which is the only one that receives.

    A frame waits for those before it, so that the buffers of a slow peer hold only one at a time. A frame of n bytes
    has to be sent within `PUSH_TIMEOUT_S + n / MIN_BYTES_PER_S` seconds; the stream of a slower peer is closed.

    Attributes:
        is_arriving: whether a frame has begun to come, or waits to be admitted.
    """

    def __init__(self, stream: Stream) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._task = asyncio.current_task()
        self._sending = asyncio.Lock()
        self._later: asyncio.Task[None] | None = None
        self.is_arriving = False
        self._receiving = False
        self._over = False
        self._interrupted_by: RemoteError | None = None

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send one frame. Raises `PeerLost`, or `PeerTimeout` if the peer does not read."""
        async with self._sending:
            await self._send(message, payload)

    async def send_later(self, delay: float, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send one frame after `delay` seconds without waiting for it. If that fails, the next frame fails as well."""
        await self._sending.acquire()
        self._later = asyncio.get_running_loop().create_task(self._send_after(delay, message, payload))
        self._later.add_done_callback(lambda _: self._sending.release())

    async def receive(self, max_payload: PayloadLimit = MAX_PAYLOAD_BYTES, admit: AdmitFrame | None = None) -> Frame:
        """Wait for one frame; see `Stream.receive`. Also raises what the stream was interrupted with."""
        self._require_open()
        self._receiving = True

        async def begin(header: bytes, payload_length: int) -> None:
            self.is_arriving = True
            assert admit is not None
            await admit(header, payload_length)

        try:
            return await self._stream.receive(max_payload, begin if admit is not None else None)
        except asyncio.CancelledError:
            error, self._interrupted_by = self._interrupted_by, None
            if error is None or self._task is None or self._task.uncancel():
                raise
            raise error from None
        finally:
            self._receiving = self.is_arriving = False

    def interrupt(self, error: RemoteError) -> None:
        """Let `receive` raise an error while it waits for the rest of a frame. No further frame can be received."""
        if self._receiving and self._task is not None and self._interrupted_by is None:
            self._interrupted_by = error
            self._task.cancel()

    async def _send_after(self, delay: float, message: Message, payload: bytes | memoryview) -> None:
        await asyncio.sleep(delay)
        with suppress(PeerLost):
            await self._send(message, payload)

    async def _send(self, message: Message, payload: bytes | memoryview) -> None:
        self._require_open()
        try:
            await self._stream.send(message, payload, PUSH_TIMEOUT_S + len(payload) / MIN_BYTES_PER_S)
        except PeerTimeout:
            self.abort()
            self._require_open()

    async def discard_incoming(self, seconds: float = DISCARD_TIMEOUT_S) -> None:
        """Discard incoming data until the peer hangs up, for so many seconds at most, so that our last reply arrives.

        A stream that is closed while the peer still sends is reset, and the peer loses what it has not read yet.
        """
        self._receiving = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stream.discard_incoming()
        finally:
            self._receiving = False

    def close(self) -> None:
        """Close the stream, and end the task that serves it once that has no computation to wait for."""
        self._over = True
        if self._later is not None:
            self._later.cancel()
            self._later = None  # a canceled task keeps what it has done, and with it this stream
        self._stream.close()
        # A stream that is closed while data is unsent does not wake its reader.
        if self._receiving and self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """Like `close`, but drop unsent data."""
        self.close()
        self._stream.abort()

    def _require_open(self) -> None:
        if self._over:
            raise PeerTimeout(f"peer …{self.peer_id[-6:]} was disconnected, or does not read what it is sent")
