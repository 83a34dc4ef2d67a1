"""Peers that share weights badly: they lie, send what was not asked for, drip, die or refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from swarm.errors import PeerLost, RemoteError
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.transport.stream import Stream

Answer = Callable[[Stream, messages.WeightsMessage, bytes], Awaitable[None]]

DRIP_S = 20.0
"""Between two bytes of an endless drip."""


def holder(parts: CheckpointParts, answer: Answer, offered: tuple[str, ...] | None = None):
    """The handler of a peer that offers parts rightly, and then answers as `answer` does.

    Args:
        answer: called with the stream, the request, and what would be right.
        offered: by default all that are held.
    """
    digests = {part: parts.manifest(part).digest for part in (parts.held if offered is None else offered)}

    async def serve(stream: Stream) -> None:
        await stream.receive(0)
        one = parts.checkpoint
        found = {part: bytes.fromhex(digest) for part, digest in digests.items()}
        await stream.send(messages.PartsFound(one.revision, one.blocks, found))
        while True:
            request = messages.decode_weights((await stream.receive(0)).header)
            await answer(stream, request, right_answer(parts, request))

    return serve


def right_answer(parts: CheckpointParts, request: Any) -> bytes:
    """What an honest peer would send."""
    if isinstance(request, messages.GetManifest):
        return parts.manifest(request.part).encoded
    if isinstance(request, messages.GetChunkDigests):
        return parts.chunk_digests(request.part)
    return parts.read(request.part, request.item, request.chunk)


def write(stream: Any, data: bytes) -> None:
    """Write bytes that need not be a frame. Raises `PeerLost` as sending does."""
    try:
        stream._writer.write(data)
    except ConnectionResetError as error:
        raise PeerLost(str(error)) from None


async def honest(stream: Stream, request: Any, right: bytes) -> None:
    """Answer rightly."""
    await stream.send(messages.PartData(), right)


def wrong_in(kind: type[messages.Message], change: Callable[[bytes], bytes]) -> Answer:
    """Answers that are changed where such a request is answered."""

    async def answer(stream: Stream, request: Any, right: bytes) -> None:
        await stream.send(messages.PartData(), change(right) if isinstance(request, kind) else right)

    return answer


def flipped(data: bytes) -> bytes:
    """The last bit changed."""
    return data[:-1] + bytes([data[-1] ^ 1])


def out_of_order() -> Answer:
    """The answers to two requests change places, again and again."""
    kept: list[bytes] = []

    async def answer(stream: Stream, request: Any, right: bytes) -> None:
        if isinstance(request, messages.GetManifest):
            await stream.send(messages.PartData(), right)
            return
        kept.append(right)
        if len(kept) == 2:
            while kept:
                await stream.send(messages.PartData(), kept.pop())

    return answer


def refusing(error: RemoteError, after: int = 0) -> Answer:
    """A refusal, after so many right answers."""
    count = 0

    async def answer(stream: Stream, request: Any, right: bytes) -> None:
        nonlocal count
        count += 1
        if count <= after:
            await stream.send(messages.PartData(), right)
            return
        await stream.send(messages.refusal(error))
        raise PeerLost("the holder has refused")

    return answer


def dying(after: int) -> Answer:
    """The end of the stream in the middle of an answer, after so many right ones."""
    count = 0

    async def answer(stream: Any, request: Any, right: bytes) -> None:
        nonlocal count
        count += 1
        if count <= after:
            await stream.send(messages.PartData(), right)
            return
        header = messages.encode(messages.PartData())
        write(stream, encode_prefix(len(header), len(right)) + header + right[: len(right) // 2])
        raise PeerLost("the holder has died")

    return answer


def ending(after: int, hangs: bool) -> Answer:
    """The end of the stream, or silence, after so many right answers."""
    count = 0

    async def answer(stream: Stream, request: Any, right: bytes) -> None:
        nonlocal count
        count += 1
        if count <= after:
            await stream.send(messages.PartData(), right)
        elif hangs:
            await stream.discard_incoming()
        else:
            raise PeerLost("the holder has closed the stream")

    return answer


async def silent(stream: Stream, request: Any, right: bytes) -> None:
    """Nothing, and the stream stays open."""
    await stream.discard_incoming()


async def dripping(stream: Any, request: Any, right: bytes) -> None:
    """A right answer of which a byte comes now and then, without end."""
    header = messages.encode(messages.PartData())
    for byte in encode_prefix(len(header), len(right)) + header + right:
        write(stream, bytes([byte]))
        await asyncio.sleep(DRIP_S)


def other_message(message: messages.Message, payload: bytes = b"") -> Answer:
    """Another message than the one that answers."""

    async def answer(stream: Stream, request: Any, right: bytes) -> None:
        await stream.send(message, payload)

    return answer


async def noise(stream: Any, request: Any, right: bytes) -> None:
    """Bytes that are no frame."""
    write(stream, b"\xff" * 64)
    await stream.discard_incoming()
