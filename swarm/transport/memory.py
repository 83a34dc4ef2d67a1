"""Peers in one process, for tests of the rooms above: no sockets, no daemon, the same `Stream`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from swarm.errors import PeerLost
from swarm.transport.stream import FrameStream, Stream, StreamHandler


class _PipeWriter:
    """The writing end of a pipe: bytes appear at the other side's reader."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._closed = False

    def write(self, data: bytes | memoryview) -> None:
        if self._closed:
            raise ConnectionResetError("the stream is closed")
        self._reader.feed_data(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.feed_eof()


def stream_pair(left: str, right: str) -> tuple[FrameStream, FrameStream]:
    """Two ends of one stream between the peers `left` and `right`: the first is held by `left`."""
    to_left, to_right = asyncio.StreamReader(), asyncio.StreamReader()
    left_writer: Any = _PipeWriter(to_right)
    right_writer: Any = _PipeWriter(to_left)
    return FrameStream(right, to_left, left_writer), FrameStream(left, to_right, right_writer)


class MemoryHub:
    """Knows every peer of one test's swarm."""

    def __init__(self) -> None:
        self.handlers: dict[str, StreamHandler] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Awaitable[None]) -> None:
        """Run a handler until it ends."""

        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class MemoryNetwork:
    """`Network` of one peer of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self.peer_id = peer_id
        self._hub = hub

    async def open_stream(self, peer_id: str) -> Stream:
        handler = self._hub.handlers.get(peer_id)
        if handler is None:
            raise PeerLost(f"peer …{peer_id[-6:]} cannot be reached")
        mine, theirs = stream_pair(self.peer_id, peer_id)
        self._hub.start(handler(theirs))
        return mine

    async def serve(self, handler: StreamHandler) -> None:
        self._hub.handlers[self.peer_id] = handler
