"""Simulates a slow network: real libp2p peers whose streams deliver everything with a delay.

    python -m benchmarks.common.delayed NETWORK [arguments of swarm server]    runs a server on such a network

NETWORK is the delay between any two machines in seconds, or a file as `slow_network` writes it. A new stream takes a
round trip before it can be used. DHT traffic is not delayed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.links import Link, Profile, uniform
from swarm.errors import PeerLost, SwarmError
from swarm.protocol.framing import MAX_PAYLOAD_BYTES, Frame
from swarm.protocol.messages import Message
from swarm.server.__main__ import main
from swarm.transport import joining
from swarm.transport.p2p import Peer
from swarm.transport.stream import AdmitFrame, PayloadLimit, Stream, StreamHandler

HEADER_BYTES = 200
"""Of a frame, about."""


@dataclass
class Network:
    """What a machine knows of the network.

    Attributes:
        profile: its links.
        here: number of the machine in the profile.
        machines: those of servers, by peer id. Other peers are clients, on machine 0.
    """

    profile: Profile
    here: int = 0
    machines: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._links: dict[str, Link] = {}

    @classmethod
    def read(cls, argument: str) -> Network:
        """From the argument of a command line."""
        try:
            return cls(uniform(float(argument)))
        except ValueError:
            stored = json.loads(Path(argument).read_text())
            return cls(Profile.read(Path(stored["profile"])), stored["here"], stored["machines"])

    def link(self, peer_id: str) -> Link:
        """The link over which frames of a peer come."""
        if peer_id not in self._links:
            there, count = self.machines.get(peer_id, 0), len(self.profile.shapes)
            self._links[peer_id] = Link(self.profile.shapes[there][self.here], count * there + self.here)
        return self._links[peer_id]


class DelayedStream:
    """A stream that delivers its frames and its end when a link would."""

    def __init__(self, stream: Stream, link: Link) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._link = link
        self._items: deque[tuple[float, Frame | SwarmError]] = deque()
        self._arrived = asyncio.Event()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, message: Message, payload: bytes | memoryview = b"", timeout_s: float | None = None) -> None:
        await self._stream.send(message, payload, timeout_s)

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
        self._add(self._now(), PeerLost("the stream is closed"))

    def abort(self) -> None:
        self._reader.cancel()
        self._stream.abort()
        self._add(self._now(), PeerLost("the stream is closed"))

    async def _read(self) -> None:
        while True:
            try:
                item: Frame | SwarmError = await self._stream.receive()
            except SwarmError as error:
                item = error
            size = 0 if isinstance(item, SwarmError) else HEADER_BYTES + len(item.payload)
            self._add(self._link.due(self._now(), size), item)
            if isinstance(item, SwarmError):
                return

    def _add(self, due: float, item: Frame | SwarmError) -> None:
        self._items.append((due, item))
        self._arrived.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class DelayedPeer(Peer):
    """A peer whose streams are all delayed."""

    network = Network(uniform(0.0))

    async def open_stream(self, peer_id: str) -> Stream:
        stream, link, loop = await super().open_stream(peer_id), self.network.link(peer_id), asyncio.get_running_loop()
        for _ in range(2):  # there and back
            await asyncio.sleep(link.due(loop.time(), 0) - loop.time())
        return DelayedStream(stream, link)

    async def serve(self, handler: StreamHandler) -> None:
        async def slow(stream: Stream) -> None:
            delayed = DelayedStream(stream, self.network.link(stream.peer_id))
            try:
                await handler(delayed)
            finally:
                delayed.close()

        await super().serve(slow)


if __name__ == "__main__":
    DelayedPeer.network = Network.read(sys.argv.pop(1))
    joining.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    main()
