"""Simulates a slow network: real libp2p peers whose streams deliver everything with a delay.

    python -m benchmarks.common.delayed SECONDS [arguments of swarm server]    runs a server on such a network

A new stream takes a round trip before it can be used. DHT traffic is not delayed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from swarm.errors import PeerLost, SwarmError
from swarm.protocol.framing import MAX_PAYLOAD_BYTES, Frame
from swarm.protocol.messages import Message
from swarm.server.__main__ import main
from swarm.transport import joining
from swarm.transport.p2p import Peer
from swarm.transport.stream import AdmitFrame, PayloadLimit, Stream, StreamHandler


class DelayedStream:
    """A stream that delivers its frames and its end `seconds` after they arrived."""

    def __init__(self, stream: Stream, seconds: float) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._seconds = seconds
        self._items: deque[tuple[float, Frame | SwarmError]] = deque()
        self._arrived = asyncio.Event()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        await self._stream.send(message, payload)

    async def receive(self, max_payload: PayloadLimit = MAX_PAYLOAD_BYTES, admit: AdmitFrame | None = None) -> Frame:
        """Receive the next frame. The limit is ignored because peers are not hostile here."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        due, item = self._items[0]
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        if isinstance(item, SwarmError):
            raise item
        self._items.popleft()
        if admit is not None:
            await admit(item.header, len(item.payload))
        return item

    async def discard_incoming(self) -> None:
        self._reader.cancel()
        await self._stream.discard_incoming()

    def close(self) -> None:
        self._reader.cancel()
        self._stream.close()
        self._add(0.0, PeerLost("the stream is closed"))

    def abort(self) -> None:
        self._reader.cancel()
        self._stream.abort()
        self._add(0.0, PeerLost("the stream is closed"))

    async def _read(self) -> None:
        while True:
            try:
                item: Frame | SwarmError = await self._stream.receive()
            except SwarmError as error:
                item = error
            self._add(self._seconds, item)
            if isinstance(item, SwarmError):
                return

    def _add(self, seconds: float, item: Frame | SwarmError) -> None:
        self._items.append((asyncio.get_running_loop().time() + seconds, item))
        self._arrived.set()


class DelayedPeer(Peer):
    """A peer whose streams are all delayed."""

    seconds = 0.0
    """One-way delay of both directions between two such peers."""

    async def open_stream(self, peer_id: str) -> Stream:
        stream = await super().open_stream(peer_id)
        await asyncio.sleep(2 * self.seconds)
        return DelayedStream(stream, self.seconds)

    async def serve(self, handler: StreamHandler) -> None:
        async def slow(stream: Stream) -> None:
            delayed = DelayedStream(stream, self.seconds)
            try:
                await handler(delayed)
            finally:
                delayed.close()

        await super().serve(slow)


if __name__ == "__main__":
    DelayedPeer.seconds = float(sys.argv.pop(1))
    joining.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    main()
