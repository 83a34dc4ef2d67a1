"""A network of peers in one process: the same `Stream` without sockets or a daemon, and faults on demand.

Time is the running loop's time, so delays also work on a virtual clock. A fault looks to the other peers as it would on
a real network: the streams of a killed peer end, the streams of a hanging peer stay open and silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from swarm.errors import PeerLost, ProtocolViolation
from swarm.protocol.messages import Message
from swarm.transport.identity import Signature
from swarm.transport.stream import UNWATCHED_BYTES, FrameStream, Stream, StreamHandler

MAX_UNREAD_BYTES = 1 << 18
"""Bytes that can be written to a hanging peer before the writer has to wait."""

Delay = Callable[[str, str], float]
"""Seconds that bytes take from one peer to another."""

DropRule = Callable[[str, str, Message], bool]
"""Whether a message from one peer to another is dropped."""


def no_delay(source: str, target: str) -> float:
    """The delay of a network where everything arrives at once."""
    return 0.0


def no_loss(source: str, target: str, message: Message) -> bool:
    """The rule of a network that drops no messages."""
    return False


class MemoryHub:
    """All peers of one test's network, and the faults of the links between them.

    Attributes:
        delay: one-way delay of each ordered pair of peers; may be replaced at any time. Bytes keep their order.
        drops: decides for each message whether it is lost.
        handlers: the stream handler of each peer that serves.
        tasks: the running handlers, each with the peer that it belongs to.
    """

    def __init__(self, delay: Delay = no_delay, drops: DropRule = no_loss) -> None:
        self.delay = delay
        self.drops = drops
        self.handlers: dict[str, StreamHandler] = {}
        self.tasks: dict[asyncio.Task[None], str] = {}
        self._pipes: dict[_Pipe, None] = {}
        self._dead: set[str] = set()
        self._hanging: set[str] = set()
        self._event = asyncio.Event()

    def kill(self, peer_id: str) -> None:
        """Kill a peer as kill -9 does: its streams end at once, its handlers are cancelled, it cannot be reached.

        A killed peer that serves again is a new peer of the same name.
        """
        self._dead.add(peer_id)
        self._hanging.discard(peer_id)
        self.handlers.pop(peer_id, None)
        for task, owner in self.tasks.items():
            if owner == peer_id:
                task.cancel()
        for pipe in [pipe for pipe in self._pipes if peer_id in pipe.between]:
            pipe.cut()
        self._wake_waiters()

    def hang(self, peer_id: str) -> None:
        """Stop a peer as SIGSTOP or a pulled cable does: its streams stay open, but carry nothing until `resume`."""
        self._hanging.add(peer_id)

    def resume(self, peer_id: str) -> None:
        """Let a hanging peer continue, and deliver what was held back."""
        self._hanging.discard(peer_id)
        for pipe in [pipe for pipe in self._pipes if peer_id in pipe.between]:
            pipe.flush()
        self._wake_waiters()

    async def close(self) -> None:
        """Cancel all handlers and wait until they have ended."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def connect(self, source: str, target: str) -> Stream:
        """Open a stream. It costs a round trip, as libp2p's negotiation of the protocol does.

        Waits while a peer hangs. Raises `PeerLost` if the target does not serve, or is the source: libp2p does not
        connect a peer with itself.
        """
        if source == target:
            raise PeerLost(f"peer …{target[-6:]} cannot connect to itself")
        await self._delay_once(source, target)
        handler = self.handlers.get(target)
        if handler is None or source in self._dead:
            raise PeerLost(f"peer …{target[-6:]} cannot be reached")
        mine, theirs = stream_pair(source, target, self)
        self._start(target, handler, theirs)
        with ExitStack() as on_failure:
            on_failure.callback(mine.close)
            await self._delay_once(target, source)
            on_failure.pop_all()
        return mine

    async def serve(self, peer_id: str, handler: StreamHandler) -> None:
        """Let a peer handle streams that others open."""
        self._dead.discard(peer_id)
        self.handlers[peer_id] = handler

    def is_held(self, between: tuple[str, str]) -> bool:
        """Whether one of two peers hangs, so that nothing passes between them."""
        return not self._hanging.isdisjoint(between)

    async def wait_until_released(self, between: tuple[str, str]) -> None:
        """Wait until neither of two peers hangs; a peer that is killed no longer hangs."""
        while self.is_held(between):
            await self._event.wait()

    def register_pipe(self, pipe: _Pipe) -> None:
        """Track a pipe, so that faults of its peers affect it."""
        self._pipes[pipe] = None

    def unregister_pipe(self, pipe: _Pipe) -> None:
        """Stop tracking a pipe that has ended."""
        self._pipes.pop(pipe, None)

    def _start(self, peer_id: str, handler: StreamHandler, stream: Stream) -> None:
        """Run a handler in a task and close its stream when it ends, as `Peer` does."""

        async def run() -> None:
            try:
                with suppress(PeerLost, ProtocolViolation):
                    await handler(stream)
            finally:
                stream.close()

        task = asyncio.get_running_loop().create_task(run())
        self.tasks[task] = peer_id
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    async def _delay_once(self, source: str, target: str) -> None:
        delay = self.delay(source, target)
        if delay > 0:
            await asyncio.sleep(delay)
        await self.wait_until_released((source, target))

    def _wake_waiters(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class MemoryNetwork:
    """The `Network` of one peer of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self.peer_id = peer_id
        self._hub = hub

    async def open_stream(self, peer_id: str) -> Stream:
        return await self._hub.connect(self.peer_id, peer_id)

    async def serve(self, handler: StreamHandler) -> None:
        await self._hub.serve(self.peer_id, handler)

    def knows(self, peer_id: str) -> bool:
        return False  # there is no DHT

    def sign(self, data: bytes) -> Signature:
        raise NotImplementedError("peers in memory have no keys")


class _Pipe:
    """One direction of a stream: bytes that are sent appear at `reader` after the delay, in order.

    Attributes:
        between: the peer that writes and the peer that reads.
        ended: whether the reader has got the end of the stream.
    """

    def __init__(self, hub: MemoryHub, source: str, target: str) -> None:
        self.between = (source, target)
        self.reader = asyncio.StreamReader()
        self.ended = False
        self._hub = hub
        self._in_flight: deque[bytes | None] = deque()
        self._arrived = 0
        """How many of the items in flight have passed their delay."""
        self._last = 0.0
        hub.register_pipe(self)

    def send(self, data: bytes | None) -> None:
        """Send bytes; None ends the stream."""
        if self.ended:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._in_flight.append(data)
        self._last = max(now + self._hub.delay(*self.between), self._last)
        if self._last > now:
            loop.call_at(self._last, self._arrive)
        else:
            self._arrive()

    def flush(self) -> None:
        """Hand what has arrived to the reader, unless one of the peers hangs."""
        while self._arrived and self._in_flight and not self._hub.is_held(self.between):
            self._arrived -= 1
            data = self._in_flight.popleft()
            if data is None:
                self.cut()
            else:
                self.reader.feed_data(data)

    async def wait_for_space(self) -> None:
        """Wait until less than `MAX_UNREAD_BYTES` are held back."""
        while self.held_bytes() > MAX_UNREAD_BYTES:
            await self._hub.wait_until_released(self.between)

    def held_bytes(self) -> int:
        """How much waits because one of the peers hangs."""
        return sum(len(data or b"") for data in self._in_flight) if self._hub.is_held(self.between) else 0

    def cut(self) -> None:
        """End the stream: the reader keeps what it already has; what is in flight is lost."""
        if not self.ended:
            self.ended = True
            self._in_flight.clear()
            self.reader.feed_eof()
            self._hub.unregister_pipe(self)

    def _arrive(self) -> None:
        self._arrived += 1
        self.flush()


class _PipeWriter:
    """One peer's end of a stream, with the interface of an asyncio writer."""

    def __init__(self, out: _Pipe, back: _Pipe) -> None:
        self._out = out
        self._back = back
        self._closed = False

    def write(self, data: bytes | memoryview) -> None:
        if self._closed or self._back.ended:  # the other side has closed the stream, and this side has seen it
            raise ConnectionResetError("the stream is closed")
        self._out.send(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)
        await self._out.wait_for_space()

    @property
    def transport(self) -> _PipeWriter:
        return self

    def get_write_buffer_size(self) -> int:
        """More than asyncio's low-water mark if `drain` waits, however few bytes a test has that happen with."""
        held = self._out.held_bytes()
        return held if held <= MAX_UNREAD_BYTES else UNWATCHED_BYTES + held

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._out.send(None)
            self._back.cut()


class _MemoryStream(FrameStream):
    """A stream whose messages may be dropped."""

    def __init__(self, hub: MemoryHub, mine: str, peer_id: str, out: _Pipe, back: _Pipe) -> None:
        writer: Any = _PipeWriter(out, back)
        super().__init__(peer_id, back.reader, writer)
        self._drops: Callable[[Message], bool] = lambda message: hub.drops(mine, peer_id, message)

    async def send(self, message: Message, payload: bytes | memoryview = b"", timeout_s: float | None = None) -> None:
        if not self._drops(message):
            await super().send(message, payload, timeout_s)


def stream_pair(left: str, right: str, hub: MemoryHub | None = None) -> tuple[FrameStream, FrameStream]:
    """The two ends of a new stream: the first belongs to the peer `left`, the second to `right`."""
    hub = hub or MemoryHub()
    there, back = _Pipe(hub, left, right), _Pipe(hub, right, left)
    return _MemoryStream(hub, left, right, there, back), _MemoryStream(hub, right, left, back, there)
