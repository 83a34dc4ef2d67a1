"""The requests of one hop: its part of a forward or backward pass. The server keeps nothing of it.

Several micro-batches may need the same server, but only a few requests are in flight to it at once: enough to keep it
busy while replies travel, few enough that the last one does not wait long. Streams stay open between requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from swarm.client.config import RequestOptions
from swarm.client.wire.adapter_upload import AdapterUpload, PackedAdapter, UploadLedger
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import (
    OutputShape,
    ReplyDeadline,
    describe_hop,
    initial_estimate,
    parse_reply,
    unexpected_reply,
    validate_gradients,
    validate_outputs,
)
from swarm.client.wire.timeout_estimator import STALL_ALLOWANCE_S
from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.common.large_payloads import run_large
from swarm.data_structures import Hop, StepLayout, WireFormat
from swarm.errors import PeerLost, PeerTimeout, WrongDtype
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import gradient_bytes
from swarm.protocol.framing import Frame
from swarm.transport.stream import Network, Stream

T = TypeVar("T")

MAX_SCALE_EXPONENT = 100
"""Largest exponent of the power of two that scales gradients, so that float32 can represent the factor."""

IDLE_TIMEOUT_S = 30.0
"""Seconds after which an idle stream is closed."""

MAX_IDLE_STREAMS_PER_SERVER = 8
"""Idle streams that are kept open to one server."""

MAX_REQUESTS_IN_FLIGHT = 8
"""Requests that may be in flight to one server."""

BACKWARD_TIME_FACTOR = 3
"""How many times longer than the forward pass the backward pass of the same tokens may take: it repeats that first."""


@dataclass(frozen=True)
class HopGradients:
    """Gradients of the blocks of one hop or of several.

    Attributes:
        inputs: gradient of the blocks' inputs, `[tokens, hidden_size]`, float32.
        parts: gradients of the adapter's tensors by block, float32; those of a missing block are zero.
    """

    inputs: torch.Tensor
    parts: Mapping[int, Sequence[torch.Tensor]]


def gradient_wire_format(wire: WireFormat) -> WireFormat:
    """The wire format of gradients where hidden states use `wire`.

    Gradients need more than 8 bits. Of the 16-bit formats, float16 has eight times the precision of bfloat16, and
    scaled gradients fit into its range.
    """
    return WireFormat.NONE if wire is WireFormat.NONE else WireFormat.FLOAT16


def pack_scaled(gradient_TH: torch.Tensor, wire: WireFormat, dtype: str) -> tuple[PackedHidden, float]:
    """Scale a gradient by a power of two so that its largest value is near 1, and encode it.

    Gradients are often below the range of 16 bits: float16 begins at 6e-8. A power of two changes no digit, and
    everything that is computed from a gradient is proportional to it.

    Args:
        gradient_TH: finite, on the CPU, float32.
        dtype: the dtype on the wire if `wire` is `WireFormat.NONE`.

    Returns:
        the encoded gradient, and the factor for `unpack_scaled` of the reply.
    """
    largest = float(gradient_TH.abs().max())
    exponent = max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, math.frexp(largest)[1]))
    scaled = (gradient_TH * 2.0**-exponent).to(HIDDEN_DTYPES[dtype] if wire is WireFormat.NONE else torch.float32)
    return PackedHidden.of(scaled, wire, dtype), 2.0**exponent


def unpack_scaled(packed: PackedHidden, factor: float) -> torch.Tensor:
    """The gradient in a reply, `[tokens, hidden_size]`, float32, with the scale of `pack_scaled` undone."""
    return packed.decoded().float() * factor


class StreamPool:
    """Idle streams by server. For the network thread.

    Args:
        network: opens streams.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._idle: dict[str, dict[Stream, asyncio.TimerHandle]] = {}

    async def exchange(self, peer_id: str, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        """Run `conversation` on an idle stream or a new one, and return its result. The stream is kept if it succeeds.

        If the server has closed the idle stream meanwhile, the conversation runs again on a new one.
        """
        stream = self._take_idle(peer_id)
        if stream is not None:
            try:
                return await self._run(peer_id, stream, conversation)
            except PeerTimeout:
                raise
            except PeerLost:
                self._close_idle(peer_id)  # what closed this one has probably closed them all
        return await self._run(peer_id, await self._network.open_stream(peer_id), conversation)

    def close(self) -> None:
        """Close all idle streams."""
        for peer_id in list(self._idle):
            self._close_idle(peer_id)

    async def _run(self, peer_id: str, stream: Stream, conversation: Callable[[Stream], Awaitable[T]]) -> T:
        try:
            result = await conversation(stream)
        except BaseException:
            stream.close()  # a late reply must not reach another request
            raise
        self._keep(peer_id, stream)
        return result

    def _take_idle(self, peer_id: str) -> Stream | None:
        """The idle stream that was used last, or None."""
        idle = self._idle.get(peer_id)
        if not idle:
            return None
        stream, timer = idle.popitem()
        timer.cancel()
        self._remove_if_empty(peer_id)
        return stream

    def _keep(self, peer_id: str, stream: Stream) -> None:
        idle = self._idle.setdefault(peer_id, {})
        if len(idle) >= MAX_IDLE_STREAMS_PER_SERVER:
            stream.close()
        else:
            idle[stream] = asyncio.get_running_loop().call_later(IDLE_TIMEOUT_S, self._expire, peer_id, stream)

    def _expire(self, peer_id: str, stream: Stream) -> None:
        del self._idle[peer_id][stream]
        self._remove_if_empty(peer_id)
        stream.close()

    def _close_idle(self, peer_id: str) -> None:
        for stream, timer in self._idle.pop(peer_id, {}).items():
            timer.cancel()
            stream.close()

    def _remove_if_empty(self, peer_id: str) -> None:
        if not self._idle[peer_id]:
            del self._idle[peer_id]


@dataclass(frozen=True)
class _HopRequest:
    """One request to a hop's server.

    Attributes:
        request: None to upload the adapter only.
        limit: maximum size of the reply's payload in bytes.
    """

    hop: Hop
    upload: AdapterUpload
    request: messages.Message | None
    payload: bytes | memoryview
    limit: int

    async def send(self, stream: Stream) -> Frame:
        """Send the request over the stream and return the reply."""
        return await self.upload.request(stream, self.hop, self.request, self.payload, self.limit)


@dataclass
class _ServerQueue:
    """This client's requests to one server.

    Attributes:
        slots: free for requests in flight.
        users: requests in flight or waiting for a slot.
        tokens: tokens of the requests in flight.
        lost: the connection broke, or a request timed out.
    """

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REQUESTS_IN_FLIGHT))
    users: int = 0
    tokens: int = 0
    lost: bool = False


class HopRequester:
    """Sends the forward and backward requests of one client. For the network thread.

    Args:
        network: opens streams to servers.
        options: the options of every request.

    Attributes:
        ledger: the adapter parts that servers hold.
    """

    def __init__(self, network: Network, options: RequestOptions) -> None:
        self.ledger = UploadLedger()
        self._options = options
        self._pool = StreamPool(network)
        self._queues: dict[str, _ServerQueue] = {}

    async def forward(
        self, hop: Hop, hidden: PackedHidden, layout: StepLayout, adapter: PackedAdapter, slowness: float = 1.0
    ) -> PackedHidden:
        """Run packed sequences through one server's blocks.

        Args:
            slowness: how many times longer than announced the server may take.

        Raises:
            PeerTimeout: the server took much longer than such a request should.
            PeerLost, ProtocolViolation: the connection broke, or the reply was not valid.
            RemoteError: the server refused the request; the class names the reason.
        """
        request = messages.ForwardRequest(
            revision=self._options.revision,
            start=hop.span.start,
            end=hop.span.end,
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            reply_format=self._options.wire,
            offsets=list(layout.offsets) if layout.offsets is not None else None,
            adapters=adapter.digests(hop.span),
        )
        shape = OutputShape(hidden.tokens, hidden.hidden_size)
        hop_request = _HopRequest(hop, AdapterUpload(adapter, self.ledger), request, hidden.payload, 4 * shape.values)
        frame = await self._request(hop_request, hidden.tokens, slowness)
        reply = parse_reply(hop, frame)
        if not isinstance(reply, messages.ForwardReply):
            raise unexpected_reply(hop, reply)
        return await run_large(len(frame.payload), validate_outputs, hop, shape, frame.payload, reply)

    async def backward(
        self,
        hop: Hop,
        inputs: PackedHidden,
        gradient_TH: torch.Tensor,
        layout: StepLayout,
        adapter: PackedAdapter,
        slowness: float = 1.0,
    ) -> HopGradients:
        """The gradients of the inputs of one server's blocks, and of their adapters.

        Args:
            inputs: the inputs of the forward pass.
            gradient_TH: gradient of the outputs, finite, on the CPU, float32.
            slowness: as for `forward`.

        Raises as `forward` does.
        """
        wire = gradient_wire_format(self._options.wire)
        try:
            return await self._backward(hop, inputs, gradient_TH, layout, adapter, slowness, wire)
        except WrongDtype:
            if wire is not WireFormat.FLOAT16:
                raise
            # On their way back through the blocks the gradients have grown beyond the range of float16.
            wire = WireFormat.BFLOAT16
            return await self._backward(hop, inputs, gradient_TH, layout, adapter, slowness, wire)

    async def upload_adapter(self, hop: Hop, adapter: PackedAdapter) -> None:
        """Send a server the parts of the adapter that it is going to need. Raises as `forward` does."""
        await self._exchange(_HopRequest(hop, AdapterUpload(adapter, self.ledger), None, b"", 0), STALL_ALLOWANCE_S)

    def close(self) -> None:
        """Close idle streams."""
        self._pool.close()

    async def _backward(
        self,
        hop: Hop,
        inputs: PackedHidden,
        gradient_TH: torch.Tensor,
        layout: StepLayout,
        adapter: PackedAdapter,
        slowness: float,
        wire: WireFormat,
    ) -> HopGradients:
        gradient, factor = pack_scaled(gradient_TH, wire, inputs.dtype)
        request = messages.BackwardRequest(
            revision=self._options.revision,
            start=hop.span.start,
            end=hop.span.end,
            counts=list(layout.counts),
            format=inputs.wire,
            dtype=inputs.dtype,
            reply_format=wire,
            offsets=list(layout.offsets) if layout.offsets is not None else None,
            adapters=adapter.digests(hop.span),
        )
        shape, specs = OutputShape(inputs.tokens, inputs.hidden_size), adapter.specs(hop.span)
        limit = 4 * shape.values + gradient_bytes(list(specs.values()), inputs.hidden_size)
        payload = b"".join((inputs.payload, gradient.payload))
        hop_request = _HopRequest(hop, AdapterUpload(adapter, self.ledger), request, payload, limit)
        frame = await self._request(hop_request, BACKWARD_TIME_FACTOR * inputs.tokens, slowness)
        reply = parse_reply(hop, frame)
        if not isinstance(reply, messages.BackwardReply):
            raise unexpected_reply(hop, reply)
        packed, parts = validate_gradients(hop, shape, list(specs.values()), frame.payload, reply)
        scaled = [[tensor * factor for tensor in part] for part in parts]
        return HopGradients(unpack_scaled(packed, factor), dict(zip(specs, scaled, strict=True)))

    async def _request(self, request: _HopRequest, tokens: int, slowness: float) -> Frame:
        """The reply to a request of `tokens` tokens, once the server has a free slot for it."""
        async with self._slot(request.hop, tokens) as queue:
            estimate = initial_estimate(request.hop, slowness, self._options.timeout)
            try:
                return await self._exchange(request, estimate.timeout(queue.tokens))
            except PeerLost:
                queue.lost = True
                raise

    async def _exchange(self, request: _HopRequest, seconds: float) -> Frame:
        peer_id = request.hop.server.peer_id
        try:
            async with ReplyDeadline(request.hop, seconds + request.upload.upload_timeout(request.hop)):
                return await self._pool.exchange(peer_id, request.send)
        except PeerLost:
            self.ledger.forget(peer_id)
            raise

    @asynccontextmanager
    async def _slot(self, hop: Hop, tokens: int) -> AsyncIterator[_ServerQueue]:
        """Wait for a free slot of the server. Raises `PeerLost` if the server is lost meanwhile."""
        peer_id = hop.server.peer_id
        queue = self._queues.get(peer_id)
        if queue is None or queue.lost:
            queue = self._queues[peer_id] = _ServerQueue()
        queue.users += 1
        try:
            async with queue.slots:
                if queue.lost:
                    raise PeerLost(f"{describe_hop(hop)} was lost before the request was sent")
                queue.tokens += tokens
                try:
                    yield queue
                finally:
                    queue.tokens -= tokens
        finally:
            queue.users -= 1
            if not queue.users and self._queues.get(peer_id) is queue:
                del self._queues[peer_id]
