"""A stream to a peer that may not read what it is sent: frames take turns and have deadlines.

Without this, one client that reads nothing could keep its handler, and with it the blocks, in memory for ever.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from swarm.errors import PeerLost, PeerTimeout
from swarm.protocol.framing import MAX_PAYLOAD_BYTES, Frame
from swarm.protocol.messages import Message
from swarm.server.sessions.push import MIN_BYTES_PER_S, PUSH_TIMEOUT_S
from swarm.transport.stream import PayloadLimit, Stream

DISCARD_TIMEOUT_S = 2.0
"""Seconds that a peer gets to read why it is refused."""


class ReplyStream:
    """A peer's stream, as the task that serves it sees it. Made in that task, which alone receives.

    A frame waits for those before it, so that only one at a time lies in the buffers of a slow peer, and its n bytes
    have `PUSH_TIMEOUT_S + n / MIN_BYTES_PER_S` seconds to leave. A peer that is slower is given up.
    """

    def __init__(self, stream: Stream) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._task = asyncio.current_task()
        self._turn = asyncio.Lock()
        self._later: asyncio.Task[None] | None = None
        self._receiving = False
        self._over = False

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send one frame. Raises `PeerLost`, or `PeerTimeout` if the peer does not read."""
        async with self._turn:
            await self._send(message, payload)

    async def send_later(self, delay: float, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send one frame after `delay` seconds, for which only the next frame waits. If it fails, so does that."""
        await self._turn.acquire()
        self._later = asyncio.get_running_loop().create_task(self._send_after(delay, message, payload))
        self._later.add_done_callback(lambda _: self._turn.release())

    async def receive(self, max_payload: PayloadLimit = MAX_PAYLOAD_BYTES) -> Frame:
        """Wait for one frame. Raises `PeerLost` at the end of the stream, `ProtocolViolation` when it is too large."""
        self._check()
        self._receiving = True
        try:
            return await self._stream.receive(max_payload)
        finally:
            self._receiving = False

    async def _send_after(self, delay: float, message: Message, payload: bytes | memoryview) -> None:
        await asyncio.sleep(delay)
        with suppress(PeerLost):
            await self._send(message, payload)

    async def _send(self, message: Message, payload: bytes | memoryview) -> None:
        self._check()
        try:
            async with asyncio.timeout(PUSH_TIMEOUT_S + len(payload) / MIN_BYTES_PER_S):
                await self._stream.send(message, payload)
        except TimeoutError:
            self.abort()
            self._check()

    async def discard_incoming(self) -> None:
        """Discard incoming data until the peer hangs up or for `DISCARD_TIMEOUT_S`, so that our last reply arrives.

        A stream that is closed while the peer still sends is reset, and what it has not read yet is lost.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                await self._stream.discard_incoming()

    def close(self) -> None:
        """End the stream, and the task that serves it as soon as it computes nothing."""
        self._over = True
        if self._later is not None:
            self._later.cancel()
        self._stream.close()
        # While something is still unsent, a stream that is closed tells its reader nothing.
        if self._receiving and self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """As `close`, whatever is unsent."""
        self.close()
        self._stream.abort()

    def _check(self) -> None:
        if self._over:
            raise PeerTimeout(f"peer …{self.peer_id[-6:]} was given up, or does not read what it is sent")
