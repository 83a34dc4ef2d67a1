"""Peers as processes of their own, which share or receive weights over a socket, and can be killed at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import PeerLost, SwarmError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import fetch_parts
from swarm.shared_weights.holder import WeightsHolder
from swarm.shared_weights.part_store import PartStore
from swarm.transport.stream import FrameStream, Stream

SENDER = "sender"


@dataclass(frozen=True)
class Shared:
    """What is shared, and where.

    Attributes:
        source, name: of the checkpoint.
        digests: of all its parts.
        socket: where the sender answers.
        root: folder of the receiver's stores.
        kept: folder for the sender's digests.
    """

    source: str
    name: str
    revision: str
    blocks: int
    digests: Mapping[str, str]
    socket: str
    root: Path
    kept: Path

    def open_store(self) -> PartStore:
        """The receiver's store."""
        return PartStore.open(self.root, self.name, self.revision, self.blocks, self.digests)


@asynccontextmanager
async def serving(path: str, handler: Callable[[Stream], Awaitable[None]], peer_id: str = "receiver"):
    """Serve streams of a socket, as `Peer` serves those of the network."""
    tasks: set[asyncio.Task[Any]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writers.add(writer)
        stream = FrameStream(peer_id, reader, writer)
        try:
            with suppress(SwarmError, OSError):
                await handler(stream)
        finally:
            stream.close()
            with suppress(OSError):
                await writer.wait_closed()
            tasks.discard(task)
            writers.discard(writer)

    with suppress(FileNotFoundError):
        os.unlink(path)
    server = await asyncio.start_unix_server(accept, path)
    try:
        yield tasks
    finally:
        server.close()
        await asyncio.sleep(0)  # whoever has connected just now is in the tasks then
        while tasks:
            for writer in writers:
                writer.transport.abort()
            await asyncio.wait(tuple(tasks))
        await asyncio.sleep(0)  # transports close a turn of the loop later


async def open_stream(path: str) -> FrameStream:
    """A stream to the peer that serves this socket. Raises `PeerLost`."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise PeerLost(f"{path} cannot be reached: {error}") from None
    return FrameStream(SENDER, reader, writer)


async def receive(shared: Shared, parts: Sequence[str], on_progress: Callable[[Any], object] = lambda _: None) -> None:
    """`fetch_parts` from the process that shares."""

    async def find() -> Sequence[str]:
        return (SENDER,)

    store = await asyncio.to_thread(shared.open_store)
    await fetch_parts(lambda peer: open_stream(shared.socket), find, store, parts, on_progress)


def send(shared: Shared, sent: Any) -> None:
    """Share until it is killed.

    Args:
        sent: bytes that were taken to be sent, by all senders.
    """

    class Counted(CheckpointParts):
        def read(self, part: str, item: int, chunk: int) -> bytes:
            data = super().read(part, item, chunk)
            sent.value += len(data)
            return data

    async def run() -> None:
        parts = Counted(open_checkpoint(shared.source, name=shared.name), shared.kept)
        holder = WeightsHolder(parts)
        await holder.prepare()
        async with serving(shared.socket, holder.serve):
            await asyncio.Event().wait()

    asyncio.run(run())


def receive_until(shared: Shared, parts: Sequence[str], function: str, calls: int) -> None:
    """Receive, and die as kill -9 does in the middle of the n-th call of a function of `os`."""
    real = getattr(os, function)
    count = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls:
            if function == "pwrite":
                descriptor, data, position = arguments
                real(descriptor, bytes(data)[: len(data) // 2], position)
            elif calls % 2:
                real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, function, call)
    asyncio.run(receive(shared, parts))
