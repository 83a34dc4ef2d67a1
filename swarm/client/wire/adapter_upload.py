"""Adapters on their way to servers: packed once, sent to each server that does not have them.

What a server was sent is remembered for as long as it said it would keep it. It may have lost it all the same; then it
says so, and gets it again, once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from swarm.client.wire.reply_checks import unexpected_reply
from swarm.data_structures import Hop, Span
from swarm.errors import NotFinite, PeerLost, RemoteError, UnknownAdapter, remote_error
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import BlockAdapterWeights, pack_adapters
from swarm.protocol.compression import dtype_name
from swarm.protocol.framing import Frame
from swarm.transport.stream import Stream

MAX_PUT_BYTES = 4 << 20
"""Bytes of adapters in one message, if that is one block's at least."""

MIN_UPLOAD_BYTES_PER_S = 1e5
"""Bytes a second of the slowest link that adapters are sent over before it is given up."""

MAX_LEDGER_SERVERS, MAX_PARTS_PER_SERVER = 1024, 4096
"""Servers whose adapters are remembered, and how many of each."""

PartKey = tuple[int, bytes]
"""A block, and the digest of its part of an adapter."""


@dataclass(frozen=True)
class PackedPart:
    """One block's part as it travels."""

    described: messages.BlockAdapterSpec
    payload: bytes


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as it was at one moment, as it travels.

    Attributes:
        parts: of the blocks that have one.
        dtype: of all of them.
    """

    parts: Mapping[int, PackedPart] = field(default_factory=dict)
    dtype: str = "float32"

    def digests(self, span: Span) -> list[bytes] | None:
        """One a block; None if none of the blocks has a part."""
        parts = [self.parts.get(block) for block in range(span.start, span.end)]
        return [part.described.digest if part else b"" for part in parts] if any(parts) else None

    def described(self, span: Span) -> dict[int, messages.BlockAdapterSpec]:
        """The parts of the span's blocks, in order."""
        blocks = [block for block in range(span.start, span.end) if block in self.parts]
        return {block: self.parts[block].described for block in blocks}

    def keys(self, span: Span) -> list[PartKey]:
        """What a server of these blocks needs."""
        return [(block, one.digest) for block, one in self.described(span).items()]

    def size(self, keys: Iterable[PartKey]) -> int:
        """Bytes of these parts."""
        return sum(len(self.parts[block].payload) for block, _ in keys)

    def puts(self, keys: Sequence[PartKey]) -> Iterator[tuple[messages.PutAdapters, bytes]]:
        """The messages that bring these parts, and their payloads."""
        for blocks in self._divided([block for block, _ in keys]):
            covered = range(blocks[0], blocks[-1] + 1)
            described = [self.parts[block].described if block in blocks else None for block in covered]
            payload = b"".join(self.parts[block].payload for block in blocks)
            yield messages.PutAdapters(blocks[0], described, self.dtype), payload

    def _divided(self, blocks: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        size = 0
        for block in blocks:
            length = len(self.parts[block].payload)
            if group and size + length > MAX_PUT_BYTES:
                yield group
                group, size = [], 0
            group.append(block)
            size += length
        if group:
            yield group


def pack_adapter(parts: Mapping[int, BlockAdapterWeights]) -> PackedAdapter:
    """The parts by block, as they are now: in 16 bits if all their tensors are of one such dtype, else in float32.

    Raises `NotFinite` if there is NaN or infinity in one.
    """
    dtypes = {tensor.dtype for part in parts.values() for tensor in part.tensors}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = common if common in (torch.float16, torch.bfloat16) else torch.float32
    packed = {}
    for block, part in sorted(parts.items()):
        if not part.tensors:
            continue
        if not all(bool(tensor.isfinite().all()) for tensor in part.tensors):
            raise NotFinite(f"the adapter of block {block} holds NaN or infinity; look for it in what was trained")
        (described,), payload = pack_adapters([part], dtype)
        packed[block] = PackedPart(described, payload)
    return PackedAdapter(packed, dtype_name(dtype))


class UploadLedger:
    """What servers were sent, and have not lost as far as is known. For the network loop."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, OrderedDict[PartKey, float]] = OrderedDict()
        self._under_way: dict[str, asyncio.Future[None]] = {}

    def lacking(self, peer_id: str, keys: Iterable[PartKey]) -> list[PartKey]:
        """Which of these the server has to be sent."""
        known: Mapping[PartKey, float] = self._until.get(peer_id, {})
        now = time.monotonic()
        return [key for key in keys if known.get(key, now) <= now]

    def kept(self, peer_id: str, keys: Sequence[PartKey], seconds: float) -> None:
        """The server has these, for so many seconds."""
        if not keys:
            return
        known = self._until.setdefault(peer_id, OrderedDict())
        self._until.move_to_end(peer_id)
        for key in keys:
            known[key] = time.monotonic() + seconds
            known.move_to_end(key)
        while len(known) > MAX_PARTS_PER_SERVER:
            known.popitem(last=False)
        while len(self._until) > MAX_LEDGER_SERVERS:
            self._until.popitem(last=False)

    def forget(self, peer_id: str) -> None:
        """The server may have lost everything."""
        self._until.pop(peer_id, None)

    async def turn(self, peer_id: str, keys: Sequence[PartKey]) -> list[PartKey]:
        """Which of these to send now. Whoever is told some has to call `done`; others wait for that."""
        while lacking := self.lacking(peer_id, keys):
            other = self._under_way.get(peer_id)
            if other is None:
                self._under_way[peer_id] = asyncio.get_running_loop().create_future()
                break
            await asyncio.wait({other})
        return lacking

    def done(self, peer_id: str) -> None:
        """Sending is over, well or not."""
        future = self._under_way.pop(peer_id, None)
        if future is not None:
            future.set_result(None)


@dataclass(frozen=True)
class AdapterUpload:
    """An adapter that goes along with requests. For the network loop."""

    adapter: PackedAdapter = field(default_factory=PackedAdapter)
    sent: UploadLedger = field(default_factory=UploadLedger)

    def seconds(self, hop: Hop) -> float:
        """What sending the server its parts may take, where it has to be."""
        lacking = self.sent.lacking(hop.server.peer_id, self.adapter.keys(hop.span))
        return self.adapter.size(lacking) / MIN_UPLOAD_BYTES_PER_S

    async def ask(
        self, stream: Stream, hop: Hop, request: messages.Message | None, payload: bytes | memoryview, limit: int
    ) -> Frame:
        """Send a request, behind what the server needs for it; the answer, whose payload has `limit` bytes at most.

        Args:
            request: None to bring what the server needs alone; the answer is then that to the last of it, or empty.

        Raises `PeerLost` or `ProtocolViolation`. A refusal is an answer.
        """
        frame = await self._ask(stream, hop, request, payload, limit)
        if self.adapter.keys(hop.span) and isinstance(_refused(frame), UnknownAdapter):
            self.sent.forget(hop.server.peer_id)
            frame = await self._ask(stream, hop, request, payload, limit)
        return frame

    async def _ask(
        self, stream: Stream, hop: Hop, request: messages.Message | None, payload: bytes | memoryview, limit: int
    ) -> Frame:
        peer_id = hop.server.peer_id
        lacking = await self.sent.turn(peer_id, self.adapter.keys(hop.span))
        try:
            puts = list(self.adapter.puts(lacking))
            for put in puts:
                await stream.send(*put)
            # Right behind: nobody waits for the adapters' way there and back.
            if request is not None:
                await stream.send(request, payload)
            answers = [await stream.receive(0) for _ in puts]
            refusals = [frame for frame in answers if _refused(frame) is not None]
            if not refusals:
                self.sent.kept(peer_id, lacking, min((_seconds(hop, frame) for frame in answers), default=0.0))
        finally:
            if lacking:
                self.sent.done(peer_id)
        if not refusals:
            return await stream.receive(limit) if request is not None else Frame(b"")
        if request is not None:
            with suppress(PeerLost):  # or the next request would get the answer to this one
                await stream.receive(limit)
        return refusals[0]


def _refused(frame: Frame) -> RemoteError | None:
    """Why the server refuses, if it does."""
    reply = messages.decode_server(frame.header) if frame.header else None
    return remote_error(reply.code, reply.message) if isinstance(reply, messages.Refusal) else None


def _seconds(hop: Hop, frame: Frame) -> float:
    """How long the server keeps adapters. Raises `ProtocolViolation` if that is not what it says."""
    reply = messages.decode_server(frame.header)
    if not isinstance(reply, messages.AdaptersStored):
        raise unexpected_reply(hop, reply)
    return reply.lifetime_s
