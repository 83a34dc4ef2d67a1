"""One server's part of a forward or backward pass: a request and its answer. The server keeps nothing of it.

Of what several micro-batches ask of one server only a few requests are under way at once: enough to keep it busy while
the answers travel, few enough that the last one need not wait long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from swarm.client.batches.gradient_packing import HopGradients, gradient_wire_format, pack_scaled, unpack_scaled
from swarm.client.batches.stream_pool import StreamPool
from swarm.client.wire.adapter_upload import AdapterUpload, PackedAdapter, UploadLedger
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import (
    OutputShape,
    describe_hop,
    initial_estimate,
    parse_reply,
    reply_deadline,
    unexpected_reply,
    validate_gradients,
    validate_outputs,
)
from swarm.client.wire.reply_timeout import STALL_ALLOWANCE_S
from swarm.client.wire.request_options import RequestOptions
from swarm.data_structures import Hop, StepLayout, WireFormat
from swarm.errors import PeerLost, WrongDtype
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import gradient_bytes
from swarm.protocol.framing import Frame
from swarm.transport.stream import Network, Stream

MAX_REQUESTS_IN_FLIGHT = 8
"""Requests that one server may have been sent and not answered."""

BACKWARD_TIME_FACTOR = 3
"""How many times longer than the forward pass of the same tokens the backward pass may take: it begins with that."""


@dataclass(frozen=True)
class _HopRequest:
    """What a server is asked.

    Attributes:
        request: None to bring it the adapter alone.
        limit: bytes that the answer may have.
    """

    hop: Hop
    carried: AdapterUpload
    request: messages.Message | None
    payload: bytes | memoryview
    limit: int

    async def over(self, stream: Stream) -> Frame:
        return await self.carried.ask(stream, self.hop, self.request, self.payload, self.limit)


@dataclass
class _ServerQueue:
    """Our requests at one server.

    Attributes:
        users: that are under way, or wait.
        tokens: of those that are under way.
        lost: the connection broke, or one was not answered in time.
    """

    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REQUESTS_IN_FLIGHT))
    users: int = 0
    tokens: int = 0
    lost: bool = False


class HopRequester:
    """Asks servers for one client. For the network loop.

    Attributes:
        sent: what servers have of adapters.

    Args:
        network: this client's place in the network.
        manner: what is asked of every server.
    """

    def __init__(self, network: Network, manner: RequestOptions) -> None:
        self.sent = UploadLedger()
        self._manner = manner
        self._pool = StreamPool(network)
        self._queues: dict[str, _ServerQueue] = {}

    async def forward(
        self, hop: Hop, hidden: PackedHidden, layout: StepLayout, adapter: PackedAdapter, slowness: float = 1.0
    ) -> PackedHidden:
        """Run packed sequences through one server's blocks.

        Raises `RemoteError` of the fitting kind; `PeerTimeout` when it takes much longer than such work should.
        """
        request = messages.ForwardRequest(
            revision=self._manner.revision,
            start=hop.span.start,
            end=hop.span.end,
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            reply_format=self._manner.wire,
            offsets=list(layout.offsets) if layout.offsets is not None else None,
            adapters=adapter.digests(hop.span),
        )
        outputs = OutputShape(hidden.tokens, hidden.hidden_size)
        ask = _HopRequest(hop, AdapterUpload(adapter, self.sent), request, hidden.payload, 4 * outputs.values)
        frame = await self._answer(ask, hidden.tokens, slowness)
        reply = parse_reply(hop, frame)
        if not isinstance(reply, messages.ForwardReply):
            raise unexpected_reply(hop, reply)
        return validate_outputs(hop, outputs, frame.payload, reply)

    async def backward(
        self,
        hop: Hop,
        inputs: PackedHidden,
        gradient_TH: torch.Tensor,
        layout: StepLayout,
        adapter: PackedAdapter,
        slowness: float = 1.0,
    ) -> HopGradients:
        """The gradients of what went into one server's blocks, and of their adapters.

        Args:
            inputs: as they went in.
            gradient_TH: of the outputs, finite, on the CPU, float32.

        Raises as `forward` does.
        """
        wire = gradient_wire_format(self._manner.wire)
        try:
            return await self._backward(hop, inputs, gradient_TH, layout, adapter, slowness, wire)
        except WrongDtype:
            if wire is not WireFormat.FLOAT16:
                raise
            # They have grown beyond what float16 holds on the way back through the blocks.
            wire = WireFormat.BFLOAT16
            return await self._backward(hop, inputs, gradient_TH, layout, adapter, slowness, wire)

    async def bring(self, hop: Hop, adapter: PackedAdapter) -> None:
        """Send a server what it is going to need of the adapter. Raises as `forward` does."""
        ask = _HopRequest(hop, AdapterUpload(adapter, self.sent), None, b"", 0)
        await self._talk(ask, STALL_ALLOWANCE_S)

    def close(self) -> None:
        """End what is idle."""
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
            revision=self._manner.revision,
            start=hop.span.start,
            end=hop.span.end,
            counts=list(layout.counts),
            format=inputs.wire,
            dtype=inputs.dtype,
            gradient_format=wire,
            offsets=list(layout.offsets) if layout.offsets is not None else None,
            adapters=adapter.digests(hop.span),
        )
        outputs, described = OutputShape(inputs.tokens, inputs.hidden_size), adapter.described(hop.span)
        limit = 4 * outputs.values + gradient_bytes(list(described.values()), inputs.hidden_size)
        payload = b"".join((inputs.payload, gradient.payload))
        ask = _HopRequest(hop, AdapterUpload(adapter, self.sent), request, payload, limit)
        frame = await self._answer(ask, BACKWARD_TIME_FACTOR * inputs.tokens, slowness)
        reply = parse_reply(hop, frame)
        if not isinstance(reply, messages.BackwardReply):
            raise unexpected_reply(hop, reply)
        packed, parts = validate_gradients(hop, outputs, list(described.values()), frame.payload, reply)
        scaled = [[tensor * factor for tensor in part] for part in parts]
        return HopGradients(unpack_scaled(packed, factor), dict(zip(described, scaled, strict=True)))

    async def _answer(self, ask: _HopRequest, tokens: int, slowness: float) -> Frame:
        async with self._turn(ask.hop, tokens) as queue:
            patience = initial_estimate(ask.hop, slowness, self._manner.timeout).allowed(queue.tokens)
            try:
                return await self._talk(ask, patience)
            except PeerLost:
                queue.lost = True
                raise

    async def _talk(self, ask: _HopRequest, patience: float) -> Frame:
        peer_id = ask.hop.server.peer_id
        try:
            async with reply_deadline(ask.hop, patience + ask.carried.seconds(ask.hop)):
                return await self._pool.talk(peer_id, ask.over)
        except PeerLost:
            self.sent.forget(peer_id)
            raise

    @asynccontextmanager
    async def _turn(self, hop: Hop, tokens: int) -> AsyncIterator[_ServerQueue]:
        """Wait until the server has few enough of our requests; raises `PeerLost` if it is lost meanwhile."""
        peer_id = hop.server.peer_id
        queue = self._queues.get(peer_id)
        if queue is None or queue.lost:
            queue = self._queues[peer_id] = _ServerQueue()
        queue.users += 1
        try:
            async with queue.room:
                if queue.lost:
                    raise PeerLost(f"{describe_hop(hop)} was lost before it was asked")
                queue.tokens += tokens
                try:
                    yield queue
                finally:
                    queue.tokens -= tokens
        finally:
            queue.users -= 1
            if not queue.users and self._queues.get(peer_id) is queue:
                del self._queues[peer_id]
