"""Adapters on their way to servers: packed once, and sent to each server that does not hold them yet.

A ledger remembers what each server holds, for as long as the server has promised to keep it. A server that has lost a
part before then refuses the request and gets all parts again, once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm.client.wire.reply_checks import unexpected_reply
from swarm.common.dtypes import dtype_name
from swarm.data_structures import Hop, Span
from swarm.errors import NotFinite, PeerLost, RemoteError, UnknownAdapter, remote_error
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import pack_adapters
from swarm.protocol.framing import Frame
from swarm.transport.stream import Stream

MAX_PUT_BYTES = 4 << 20
"""Maximum payload of one upload message in bytes; a message holds at least one block's part, however large."""

MIN_UPLOAD_BYTES_PER_S = 1e5
"""Bytes a second: an upload over a slower link times out."""

MAX_LEDGER_SERVERS = 1024
"""Servers that the ledger remembers."""

MAX_PARTS_PER_SERVER = 4096
"""Parts that the ledger remembers of each server."""

PartKey = tuple[int, bytes]
"""A block and the digest of its part of an adapter."""


class Adapter(Protocol):
    """Soft prompts and LoRA factors by block. Its tensors may require gradients and depend on other tensors."""

    def part(self, block: int) -> BlockAdapterWeights | None:
        """What is added to one block of the model, with current values; None if nothing is added."""


def adapter_parts(adapter: Adapter | None, span: Span) -> dict[int, BlockAdapterWeights]:
    """The adapter's parts for the blocks of `span`, with current values; blocks without a part are missing."""
    if adapter is None:
        return {}
    parts = {block: adapter.part(block) for block in range(span.start, span.end)}
    return {block: part for block, part in parts.items() if part is not None and part.tensors}


def detach_parts(parts: Mapping[int, BlockAdapterWeights]) -> dict[int, BlockAdapterWeights]:
    """Copies of the parts that later training does not change."""
    return {block: part.map_tensors(lambda tensor: tensor.detach().clone()) for block, part in parts.items()}


@dataclass(frozen=True)
class PackedPart:
    """One block's part of an adapter, encoded for the wire."""

    spec: messages.BlockAdapterSpec
    payload: bytes


@dataclass(frozen=True)
class PackedAdapter:
    """A snapshot of an adapter, encoded for the wire.

    Attributes:
        parts: the parts by block; blocks without a part are missing.
        dtype: the dtype of all parts.
    """

    parts: Mapping[int, PackedPart] = field(default_factory=dict)
    dtype: str = "float32"

    def digests(self, span: Span) -> list[bytes] | None:
        """One digest for each block, empty for a block without a part; None if no block of the span has a part."""
        parts = [self.parts.get(block) for block in range(span.start, span.end)]
        return [part.spec.digest if part else b"" for part in parts] if any(parts) else None

    def specs(self, span: Span) -> dict[int, messages.BlockAdapterSpec]:
        """The specs of the span's parts by block, in order."""
        blocks = [block for block in range(span.start, span.end) if block in self.parts]
        return {block: self.parts[block].spec for block in blocks}

    def keys(self, span: Span) -> list[PartKey]:
        """The keys of the parts that a server of this span needs."""
        return [(block, spec.digest) for block, spec in self.specs(span).items()]

    def payload_bytes(self, keys: Iterable[PartKey]) -> int:
        """The size of these parts in bytes."""
        return sum(len(self.parts[block].payload) for block, _ in keys)

    def upload_messages(self, keys: Sequence[PartKey]) -> Iterator[tuple[messages.PutAdapters, bytes]]:
        """The messages that upload these parts, each with its payload."""
        for blocks in self._message_groups([block for block, _ in keys]):
            covered = range(blocks[0], blocks[-1] + 1)
            specs = [self.parts[block].spec if block in blocks else None for block in covered]
            payload = b"".join(self.parts[block].payload for block in blocks)
            yield messages.PutAdapters(blocks[0], specs, self.dtype), payload

    def _message_groups(self, blocks: Sequence[int]) -> Iterator[list[int]]:
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
    """Encode the current values of an adapter's parts.

    The dtype is float16 or bfloat16 if all tensors have it, else float32.

    Raises:
        NotFinite: a tensor contains NaN or infinity.
    """
    dtypes = {tensor.dtype for part in parts.values() for tensor in part.tensors}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = common if common in (torch.float16, torch.bfloat16) else torch.float32
    packed = {}
    for block, part in sorted(parts.items()):
        if not part.tensors:
            continue
        if not all(bool(tensor.isfinite().all()) for tensor in part.tensors):
            raise NotFinite(f"the adapter of block {block} contains NaN or infinity; check the training that made it")
        (spec,), payload = pack_adapters([part], dtype)
        packed[block] = PackedPart(spec, payload)
    return PackedAdapter(packed, dtype_name(dtype))


class UploadLedger:
    """Remembers which adapter parts each server holds, as far as this client knows. For the network thread."""

    def __init__(self) -> None:
        self._expiry: OrderedDict[str, OrderedDict[PartKey, float]] = OrderedDict()
        self._uploads: dict[str, asyncio.Future[None]] = {}
        """The upload in progress to each server; done when it ends."""

    def missing(self, peer_id: str, keys: Iterable[PartKey]) -> list[PartKey]:
        """Those of the parts that the server does not hold."""
        known: Mapping[PartKey, float] = self._expiry.get(peer_id, {})
        now = time.monotonic()
        return [key for key in keys if known.get(key, now) <= now]

    def record(self, peer_id: str, keys: Sequence[PartKey], seconds: float) -> None:
        """The server has received these parts and keeps them for `seconds`."""
        if not keys:
            return
        known = self._expiry.setdefault(peer_id, OrderedDict())
        self._expiry.move_to_end(peer_id)
        for key in keys:
            known[key] = time.monotonic() + seconds
            known.move_to_end(key)
        while len(known) > MAX_PARTS_PER_SERVER:
            known.popitem(last=False)
        while len(self._expiry) > MAX_LEDGER_SERVERS:
            self._expiry.popitem(last=False)

    def forget(self, peer_id: str) -> None:
        """The server may have lost all parts."""
        self._expiry.pop(peer_id, None)

    async def claim_missing(self, peer_id: str, keys: Sequence[PartKey]) -> list[PartKey]:
        """The parts that the caller has to upload now; it must call `release` when it has finished.

        Waits while another upload to the same server is in progress, because that may bring the same parts.
        """
        while missing := self.missing(peer_id, keys):
            upload = self._uploads.get(peer_id)
            if upload is None:
                self._uploads[peer_id] = asyncio.get_running_loop().create_future()
                break
            await asyncio.wait({upload})
        return missing

    def release(self, peer_id: str) -> None:
        """The upload that `claim_missing` began has ended, successfully or not."""
        upload = self._uploads.pop(peer_id, None)
        if upload is not None:
            upload.set_result(None)


@dataclass(frozen=True)
class AdapterUpload:
    """Uploads an adapter to a server together with the first request that needs it. For the network thread.

    Attributes:
        adapter: the adapter; empty for none.
        ledger: which parts the servers hold; shared by all requests of the client.
    """

    adapter: PackedAdapter = field(default_factory=PackedAdapter)
    ledger: UploadLedger = field(default_factory=UploadLedger)

    def upload_timeout(self, hop: Hop) -> float:
        """Seconds that the upload of the missing parts may take; 0 if the server holds all of them."""
        missing = self.ledger.missing(hop.server.peer_id, self.adapter.keys(hop.span))
        return self.adapter.payload_bytes(missing) / MIN_UPLOAD_BYTES_PER_S

    async def request(
        self, stream: Stream, hop: Hop, request: messages.Message | None, payload: bytes | memoryview, limit: int
    ) -> Frame:
        """Upload what the server lacks, send a request right behind it, and return the reply, which may be a refusal.

        A server that has lost a part says so and gets all parts again, once.

        Args:
            request: None to upload only. The returned frame is then the first refusal, or empty.
            limit: maximum size of the reply's payload in bytes.

        Raises:
            PeerLost: the connection broke.
            ProtocolViolation: the server's answer to the upload was not valid.
        """
        frame = await self._request(stream, hop, request, payload, limit)
        if self.adapter.keys(hop.span) and isinstance(_refusal(frame), UnknownAdapter):
            self.ledger.forget(hop.server.peer_id)
            frame = await self._request(stream, hop, request, payload, limit)
        return frame

    async def _request(
        self, stream: Stream, hop: Hop, request: messages.Message | None, payload: bytes | memoryview, limit: int
    ) -> Frame:
        peer_id = hop.server.peer_id
        missing = await self.ledger.claim_missing(peer_id, self.adapter.keys(hop.span))
        try:
            uploads = list(self.adapter.upload_messages(missing))
            for upload in uploads:
                await stream.send(*upload)
            # Sent right behind, so that the upload costs no round trip of its own.
            if request is not None:
                await stream.send(request, payload)
            answers = [await stream.receive(0) for _ in uploads]
            refusals = [frame for frame in answers if _refusal(frame) is not None]
            if not refusals:
                self.ledger.record(peer_id, missing, min((_kept_seconds(hop, one) for one in answers), default=0.0))
        finally:
            if missing:
                self.ledger.release(peer_id)
        if not refusals:
            return await stream.receive(limit) if request is not None else Frame(b"")
        if request is not None:
            with suppress(PeerLost):  # read and dropped, or the next request would get this reply
                await stream.receive(limit)
        return refusals[0]


def _refusal(frame: Frame) -> RemoteError | None:
    """The error of a frame that is a refusal, else None."""
    reply = messages.decode_server(frame.header) if frame.header else None
    return remote_error(reply.code, reply.message) if isinstance(reply, messages.Refusal) else None


def _kept_seconds(hop: Hop, frame: Frame) -> float:
    """How long the server keeps the parts. Raises `ProtocolViolation` if the frame is another message."""
    reply = messages.decode_server(frame.header)
    if not isinstance(reply, messages.AdaptersStored):
        raise unexpected_reply(hop, reply)
    return reply.lifetime_s
