"""The asking side of one stream on which a peer shares weights: requests in, checked answers out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from swarm.errors import PeerTimeout, ProtocolViolation, RemoteError, remote_error
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from swarm.shared_weights.manifest import (
    DIGEST_BYTES,
    MAX_MANIFEST_BYTES,
    PartManifest,
    is_part,
    item_digest,
)
from swarm.shared_weights.part_store import Chunk
from swarm.transport.stream import Stream

ANSWER_TIMEOUT_S = 60.0
"""For the answer to one request, behind those that were sent before. A chunk takes 17 s on an uplink of 0.5 Mbit/s."""

FIND_TIMEOUT_S = 30.0
"""For the first answer, which is small, and tells a peer that shares something from one that only says so."""


@dataclass(frozen=True)
class _Turn:
    """When the answer to a request is the next one of the stream, and when it has been received."""

    begins: asyncio.Event
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class HolderStream:
    """A stream to a peer that shares a model. Questions may be asked while chunks are under way, one at a time.

    All methods raise `RemoteError`: `PeerLost` if the peer is gone or too slow, `ProtocolViolation` if it sends what
    was not asked for, or the error that it refused with.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.peer_id = stream.peer_id
        self._last_ended = asyncio.Event()
        self._last_ended.set()
        self._chunk_turns: deque[_Turn] = deque()
        self._pending = 0
        self._waiting_since = time.monotonic()
        self._failure: RemoteError | None = None
        """What went wrong first: what comes behind it is no answer to anything."""

    @property
    def silent_s(self) -> float:
        """For how many seconds it has not answered, though something is asked; 0 if nothing is."""
        return time.monotonic() - self._waiting_since if self._pending else 0.0

    async def find(self, model: str, revision: str) -> messages.PartsFound:
        """Which parts the peer shares. It comes first.

        Args:
            revision: "" for the one that the peer has.
        """
        turn = await self._send(messages.FindParts(model, revision))
        reply = messages.decode_weights((await self._receive(turn, 0, FIND_TIMEOUT_S)).header)
        if isinstance(reply, messages.Refusal):
            raise remote_error(reply.code, reply.message)
        if not isinstance(reply, messages.PartsFound):
            raise ProtocolViolation(f"peer …{self.peer_id[-6:]} answered FindParts with {type(reply).__name__}")
        if (revision and reply.revision != revision) or not all(is_part(one, reply.blocks) for one in reply.digests):
            raise ProtocolViolation(f"peer …{self.peer_id[-6:]} answered for another model")
        return reply

    async def manifest(self, part: str) -> bytes:
        """A part's manifest, unchecked."""
        turn = await self._send(messages.GetManifest(part))
        return bytes(await self._data(turn, MAX_MANIFEST_BYTES))

    async def chunk_digests(self, part: str, manifest: PartManifest) -> list[bytes]:
        """The digests of the chunks of each item, checked against the items'; empty for items of one chunk."""
        sizes = [item.chunks * DIGEST_BYTES if item.chunks > 1 else 0 for item in manifest.items]
        if not any(sizes):
            return [b""] * len(sizes)
        turn = await self._send(messages.GetChunkDigests(part))
        with self._noting_failure():
            data = bytes(await self._data(turn, sum(sizes)))
            ends = list(accumulate(sizes))
            found = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            for item, size, digests in zip(manifest.items, sizes, found, strict=True):
                if len(digests) != size or (size and item_digest(digests) != item.digest):
                    raise ProtocolViolation(f"peer …{self.peer_id[-6:]} sent wrong digests of {item.name[:64]}")
            return found

    async def ask(self, chunk: Chunk) -> None:
        """Ask for a chunk; several may be asked for before the first is received."""
        self._chunk_turns.append(await self._send(messages.GetChunk(chunk.part, chunk.item, chunk.number)))

    async def receive(self, chunk: Chunk) -> memoryview | bytes:
        """The chunk that was asked for first, unchecked but for its length."""
        data = await self._data(self._chunk_turns.popleft(), chunk.length)
        if len(data) != chunk.length:
            raise ProtocolViolation(f"peer …{self.peer_id[-6:]} sent a chunk of {len(data)} bytes, not {chunk.length}")
        return data

    def close(self) -> None:
        """End the stream, also where answers are under way."""
        self._stream.abort()

    async def _data(self, turn: _Turn, max_bytes: int) -> memoryview | bytes:
        with self._noting_failure():
            frame = await self._receive(turn, max_bytes, ANSWER_TIMEOUT_S)
            reply = messages.decode_weights(frame.header)
            if isinstance(reply, messages.Refusal):
                raise remote_error(reply.code, reply.message)
            if not isinstance(reply, messages.PartData):
                raise ProtocolViolation(f"peer …{self.peer_id[-6:]} sent {type(reply).__name__}, not PartData")
            return frame.payload

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except RemoteError as error:
            self._failure = self._failure or error
            raise

    async def _send(self, message: messages.Message) -> _Turn:
        """Send a request; answers come in the order in which this is called."""
        turn = _Turn(self._last_ended)
        self._last_ended = turn.ended
        if not self._pending:
            self._waiting_since = time.monotonic()
        self._pending += 1
        await self._stream.send(message)
        return turn

    async def _receive(self, turn: _Turn, max_bytes: int, timeout_s: float) -> Frame:
        await turn.begins.wait()
        try:
            if self._failure is not None:
                raise self._failure
            async with asyncio.timeout(timeout_s):
                return await self._stream.receive(max_bytes)
        except TimeoutError:
            raise PeerTimeout(f"peer …{self.peer_id[-6:]} did not answer for {timeout_s:.0f} s") from None
        finally:
            self._pending -= 1
            self._waiting_since = time.monotonic()
            turn.ended.set()


def offers(found: Mapping[str, bytes], digests: Mapping[str, str]) -> frozenset[str]:
    """The parts that a peer has as they are trusted. Pure."""
    return frozenset(part for part, digest in found.items() if digests.get(part) == digest.hex())
