"""Peers in one process, for tests of the rooms above: no sockets, no daemon, the same `Stream`; and faults on demand.

Time is the running loop's, so that delays also pass on a clock that a test moves. Every fault is what the other peers
would see of it: a killed peer's streams end, a hanging peer's streams stay open and silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from swarm.errors import PeerLost, ProtocolViolation
from swarm.protocol.messages import Message
from swarm.transport.stream import FrameStream, Stream, StreamHandler

WINDOW = 1 << 18
"""Bytes that may be written to a peer that hangs before the writer has to wait."""

Delay = Callable[[str, str], float]
"""Seconds that bytes travel from one peer to another."""

Loses = Callable[[str, str, Message], bool]
"""Whether a message from one peer to another is lost."""


def no_delay(source: str, target: str) -> float:
    """Everything arrives at once."""
    return 0.0


def no_loss(source: str, target: str, message: Message) -> bool:
    """No message is lost."""
    return False


class MemoryHub:
    """Knows every peer of one test's swarm, and what is wrong with the ways between them.

    Attributes:
        delay: one-way delay of each ordered pair of peers; may be replaced at any time. What was written first also
            arrives first.
        loses: asked for each message that is sent.
        handlers: of the peers that serve.
        tasks: the handlers that run now, and whose they are.
    """

    def __init__(self, delay: Delay = no_delay, loses: Loses = no_loss) -> None:
        self.delay = delay
        self.loses = loses
        self.handlers: dict[str, StreamHandler] = {}
        self.tasks: dict[asyncio.Task[None], str] = {}
        self._pipes: dict[_Pipe, None] = {}
        self._dead: set[str] = set()
        self._hanging: set[str] = set()
        self._event = asyncio.Event()

    def kill(self, peer_id: str) -> None:
        """As kill -9: its streams end at once for the others, what it does is broken off, it cannot be reached.

        A killed peer that serves again is a new one of the same name.
        """
        self._dead.add(peer_id)
        self._hanging.discard(peer_id)
        self.handlers.pop(peer_id, None)
        for task, owner in self.tasks.items():
            if owner == peer_id:
                task.cancel()
        for pipe in [pipe for pipe in self._pipes if peer_id in pipe.between]:
            pipe.cut()
        self._changed()

    def hang(self, peer_id: str) -> None:
        """As SIGSTOP or a pulled cable: its streams stay open, but nothing comes to it or from it until `resume`."""
        self._hanging.add(peer_id)

    def resume(self, peer_id: str) -> None:
        """What was held back is delivered."""
        self._hanging.discard(peer_id)
        for pipe in [pipe for pipe in self._pipes if peer_id in pipe.between]:
            pipe.flush()
        self._changed()

    async def close(self) -> None:
        """Break off all handlers and wait for their ends."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def connect(self, source: str, target: str) -> Stream:
        """A new stream, which costs a round trip as libp2p's negotiation of the protocol does.

        Waits for a peer that hangs. Raises `PeerLost` if the target does not serve.
        """
        await self._travel(source, target)
        handler = self.handlers.get(target)
        if handler is None or source in self._dead:
            raise PeerLost(f"peer …{target[-6:]} cannot be reached")
        mine, theirs = stream_pair(source, target, self)
        self._start(target, handler, theirs)
        try:
            await self._travel(target, source)
        except BaseException:
            mine.close()
            raise
        return mine

    async def serve(self, peer_id: str, handler: StreamHandler) -> None:
        """Let the peer answer."""
        self._dead.discard(peer_id)
        self.handlers[peer_id] = handler

    def is_held(self, between: tuple[str, str]) -> bool:
        """True if nothing passes between two peers at present."""
        return not self._hanging.isdisjoint(between)

    async def wait_until_free(self, between: tuple[str, str]) -> None:
        """Return when things pass again between two peers, or one of them was killed."""
        while self.is_held(between):
            await self._event.wait()

    def add(self, pipe: _Pipe) -> None:
        """Keep an eye on a pipe."""
        self._pipes[pipe] = None

    def forget(self, pipe: _Pipe) -> None:
        """The pipe has come to its end."""
        self._pipes.pop(pipe, None)

    def _start(self, peer_id: str, handler: StreamHandler, stream: Stream) -> None:
        """Run a handler until it ends, and close its stream then, as `Peer` does."""

        async def run() -> None:
            try:
                with suppress(PeerLost, ProtocolViolation):
                    await handler(stream)
            finally:
                stream.close()

        task = asyncio.get_running_loop().create_task(run())
        self.tasks[task] = peer_id
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    async def _travel(self, source: str, target: str) -> None:
        delay = self.delay(source, target)
        if delay > 0:
            await asyncio.sleep(delay)
        await self.wait_until_free((source, target))

    def _changed(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class MemoryNetwork:
    """`Network` of one peer of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self.peer_id = peer_id
        self._hub = hub

    async def open_stream(self, peer_id: str) -> Stream:
        return await self._hub.connect(self.peer_id, peer_id)

    async def serve(self, handler: StreamHandler) -> None:
        await self._hub.serve(self.peer_id, handler)


class _Pipe:
    """One direction of a stream: what is put in appears at `reader` after the delay, in order.

    Attributes:
        between: the peer that writes and the one that reads.
        ended: nothing more appears.
    """

    def __init__(self, hub: MemoryHub, source: str, target: str) -> None:
        self.between = (source, target)
        self.reader = asyncio.StreamReader()
        self.ended = False
        self._hub = hub
        self._travelling: deque[bytes | None] = deque()
        self._arrived = 0
        """How many of them have been on their way for long enough."""
        self._last = 0.0
        hub.add(self)

    def put(self, data: bytes | None) -> None:
        """Send bytes on their way; None is the end."""
        if self.ended:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._travelling.append(data)
        self._last = max(now + self._hub.delay(*self.between), self._last)
        if self._last > now:
            loop.call_at(self._last, self._arrive)
        else:
            self._arrive()

    def flush(self) -> None:
        """Hand over what has arrived, if nothing holds it back."""
        while self._arrived and self._travelling and not self._hub.is_held(self.between):
            self._arrived -= 1
            data = self._travelling.popleft()
            if data is None:
                self.cut()
            else:
                self.reader.feed_data(data)

    async def has_room(self) -> None:
        """Return when not too much is held back."""
        while self._hub.is_held(self.between) and sum(len(data or b"") for data in self._travelling) > WINDOW:
            await self._hub.wait_until_free(self.between)

    def cut(self) -> None:
        """The reader gets what it has, and then the end; what is on its way is lost."""
        if not self.ended:
            self.ended = True
            self._travelling.clear()
            self.reader.feed_eof()
            self._hub.forget(self)

    def _arrive(self) -> None:
        self._arrived += 1
        self.flush()


class _PipeWriter:
    """What one peer holds of a stream, as an asyncio writer."""

    def __init__(self, out: _Pipe, back: _Pipe) -> None:
        self._out = out
        self._back = back
        self._closed = False

    def write(self, data: bytes | memoryview) -> None:
        if self._closed or self._back.ended:  # the other side has closed it, and this one knows
            raise ConnectionResetError("the stream is closed")
        self._out.put(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)
        await self._out.has_room()

    @property
    def transport(self) -> _PipeWriter:
        return self

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._out.put(None)
            self._back.cut()


class _MemoryStream(FrameStream):
    """A stream that may lose a message."""

    def __init__(self, hub: MemoryHub, mine: str, peer_id: str, out: _Pipe, back: _Pipe) -> None:
        writer: Any = _PipeWriter(out, back)
        super().__init__(peer_id, back.reader, writer)
        self._loses: Callable[[Message], bool] = lambda message: hub.loses(mine, peer_id, message)

    async def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        if not self._loses(message):
            await super().send(message, payload)


def stream_pair(left: str, right: str, hub: MemoryHub | None = None) -> tuple[FrameStream, FrameStream]:
    """Two ends of one stream between the peers `left` and `right`: the first is held by `left`."""
    hub = hub or MemoryHub()
    there, back = _Pipe(hub, left, right), _Pipe(hub, right, left)
    return _MemoryStream(hub, left, right, there, back), _MemoryStream(hub, right, left, back, there)
