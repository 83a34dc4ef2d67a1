"""Shares the parts of a model that are on this machine with peers that ask for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from swarm.common.token_buckets import RateLimit
from swarm.errors import (
    CheckpointError,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    RequestRefused,
    ServerFault,
    TooManyDownloads,
    WeightsNotReady,
    WeightsNotShared,
)
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.manifest import CHUNK_BYTES
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)

BUSY_BYTES_PER_S = 8 << 20
"""While clients wait for what this machine computes. Sending takes processor time, too."""


class UploadPace:
    """Bounds the bytes that are sent to all peers together.

    Args:
        now: seconds of a monotonic clock.
        bytes_per_s: None for no bound.
        is_busy: whether clients wait for what this machine computes.
    """

    def __init__(
        self,
        now: Callable[[], float],
        bytes_per_s: float | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._now, self._is_busy = now, is_busy
        self._always = RateLimit(bytes_per_s, CHUNK_BYTES) if bytes_per_s is not None else None
        self._while_busy = RateLimit(BUSY_BYTES_PER_S, CHUNK_BYTES)

    async def wait(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        now = self._now()
        delay = self._always.delay(size, now) if self._always is not None else 0.0
        if self._is_busy():
            delay = max(delay, self._while_busy.delay(size, now))
        if delay > 0:
            await asyncio.sleep(delay)


MAX_STREAMS = 16
MAX_PEER_STREAMS = 2
"""Each takes a chunk of memory."""

IDLE_TIMEOUT_S = 60.0
"""A stream without a request is closed after this time, so that it takes no room from others."""

SEND_TIMEOUT_S = 60.0
"""A peer that does not take an answer for so long is given up, so that it keeps neither memory nor room. A peer that
asks waits no longer for a chunk, either."""


class WeightsHolder:
    """Answers other peers' requests for the parts of one model. Files are read in threads.

    Args:
        parts: what is shared.
        bytes_per_s: sent to all peers together at most; None for no bound.
        is_busy: whether clients wait for what this machine computes; little is sent then.

    Attributes:
        parts: may be replaced, when there are more of them.
        sent_bytes: of tensors and files so far.
    """

    def __init__(
        self,
        parts: CheckpointParts,
        *,
        bytes_per_s: float | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.parts = parts
        self.sent_bytes = 0
        self._pace = UploadPace(time.monotonic, bytes_per_s, is_busy)
        self._streams: Counter[str] = Counter()
        self._max_streams = _streams_at(bytes_per_s)
        self._preparing = 0
        self._is_prepared = False

    async def prepare(self) -> None:
        """Compute the digests of what is shared, where that was not done before. Until then it is not offered."""
        parts = self.parts
        self._preparing += 1
        try:
            for part in await asyncio.to_thread(lambda: parts.held):  # which reads the checkpoint's index
                try:
                    await asyncio.to_thread(parts.manifest, part)
                except CheckpointError as error:
                    logger.warning("Part %s of %s is not shared: %s", part, parts.checkpoint.name, error)
            self._is_prepared = True
        except Exception:
            self._is_prepared = True  # there is nothing to wait for
            raise
        finally:
            self._preparing -= 1

    async def serve(self, stream: Stream) -> None:
        """Answer one peer's requests until it closes the stream. Raises `PeerLost` when it does."""
        peer = stream.peer_id
        if self._streams.total() >= self._max_streams or self._streams[peer] >= MAX_PEER_STREAMS:
            error = TooManyDownloads(f"{self._streams.total()} downloads from this peer are under way")
            await _send(stream, messages.refusal(error))
            return
        self._streams[peer] += 1
        try:
            await self._serve(stream)
        except RemoteError as error:
            if isinstance(error, PeerLost):
                raise
            await _send(stream, messages.refusal(error))
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, stream: Stream) -> None:
        first = messages.decode_weights((await _receive(stream)).header)
        if not isinstance(first, messages.FindParts):
            raise ProtocolViolation(f"{type(first).__name__} came before FindParts")
        parts = self.parts
        await _send(stream, await self._found(parts, first))
        while True:
            request = messages.decode_weights((await _receive(stream)).header)
            payload = await self._answer(parts, request)
            await self._pace.wait(len(payload))
            await _send(stream, messages.PartData(), payload)
            if isinstance(request, messages.GetChunk):
                self.sent_bytes += len(payload)

    async def _found(self, parts: CheckpointParts, asked: messages.FindParts) -> messages.PartsFound:
        one = parts.checkpoint
        if asked.model != one.name or asked.revision not in ("", one.revision):
            raise WeightsNotShared(
                f"this peer shares {one.name} of revision {one.revision}, not {asked.model} of "
                f"{asked.revision or 'any revision'}"
            )
        digests = {part: bytes.fromhex(digest) for part, digest in parts.known_digests.items()}
        # The parts that are known now would be taken for all that there are, also while a server still loads.
        if self._preparing or not (digests or self._is_prepared):
            raise WeightsNotReady("this peer is still reading the weights that it shares; ask again in a minute")
        return messages.PartsFound(one.revision, one.blocks, digests)

    async def _answer(self, parts: CheckpointParts, request: messages.WeightsMessage) -> bytes:
        if not isinstance(request, (messages.GetManifest, messages.GetChunkDigests, messages.GetChunk)):
            raise ProtocolViolation(f"{type(request).__name__} is not a request for weights")
        if request.part not in parts.held:
            raise WeightsNotShared(f"this peer does not share part {request.part} of {parts.checkpoint.name}")
        try:
            return await asyncio.to_thread(_read, parts, request)
        except CheckpointError as error:
            logger.warning("Part %s of %s cannot be shared: %s", request.part, parts.checkpoint.name, error)
            raise ServerFault(f"this peer cannot read part {request.part} any more") from None


def _read(
    parts: CheckpointParts, request: messages.GetManifest | messages.GetChunkDigests | messages.GetChunk
) -> bytes:
    manifest = parts.manifest(request.part)
    if isinstance(request, messages.GetManifest):
        return manifest.encoded
    if isinstance(request, messages.GetChunkDigests):
        return parts.chunk_digests(request.part)
    if request.item >= len(manifest.items):
        raise RequestRefused(f"part {request.part} has {len(manifest.items)} items, none has number {request.item}")
    item = manifest.items[request.item]
    if request.chunk >= item.chunks:
        raise RequestRefused(f"{item.name} has {item.chunks} chunks, none has number {request.chunk}")
    return parts.read(request.part, request.item, request.chunk)


def _streams_at(bytes_per_s: float | None) -> int:
    """How many peers may receive at once, if so many bytes are sent to all together: each gets its chunks in time."""
    if bytes_per_s is None:
        return MAX_STREAMS
    return max(1, min(MAX_STREAMS, int(bytes_per_s * SEND_TIMEOUT_S / 2 / CHUNK_BYTES)))


async def _send(stream: Stream, message: messages.Message, payload: bytes = b"") -> None:
    """Send an answer. Raises `PeerLost`, also if the peer does not take it in time: what it was sent is dropped."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await stream.send(message, payload)
    except TimeoutError:
        stream.abort()
        raise PeerTimeout(f"peer …{stream.peer_id[-6:]} took no answer for {SEND_TIMEOUT_S:.0f} s") from None


async def _receive(stream: Stream) -> Frame:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await stream.receive(0)
    except TimeoutError:
        raise PeerTimeout(f"peer …{stream.peer_id[-6:]} asked for nothing for {IDLE_TIMEOUT_S:.0f} s") from None
