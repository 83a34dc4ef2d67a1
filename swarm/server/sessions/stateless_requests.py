"""What a server answers without a session: forwards and backwards over whole sequences, and the adapters for them.

Like the handler, it decodes, validates and refuses; the engine computes. Nothing is kept between calls but adapters.
"""

from __future__ import annotations

from swarm.data_structures import Span, WireFormat
from swarm.errors import WrongSpan
from swarm.models.adapters.adapter_batch import AdapterWeights
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import BlockAdapterWeights, unpack_adapters
from swarm.protocol.compression import dtype_name, load_quantizer
from swarm.server.compute import compute_request as requests
from swarm.server.compute.compute_request import Bytes
from swarm.server.compute.engine import Engine
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.request_validation import RequestValidator

MAX_INLINE_BYTES = 1 << 20
"""Bytes of adapters that the network loop checks by itself, in a millisecond or two; more go to the compute thread."""


class StatelessRequests:
    """The training requests of one server's peers.

    Args:
        adapters: where they are kept.
    """

    def __init__(self, model: SpanModel, checks: RequestValidator, engine: Engine, adapters: AdapterStore) -> None:
        self.adapters = adapters
        self._model = model
        self._checks = checks
        self._engine = engine
        self._warm = False

    @property
    def max_payload(self) -> int:
        """Bytes that no payload exceeds."""
        return max(self._checks.max_payload, self.adapters.limits.peer_memory)

    def adapter(self, peer: str, span: Span, digests: list[bytes] | None) -> AdapterWeights:
        """What a request names. Raises `UnknownAdapter`, or `WrongShape`."""
        return self.adapters.find(peer, span, digests)

    async def forward(
        self, peer: str, message: messages.ForwardRequest, payload: Bytes
    ) -> tuple[messages.ForwardReply, Bytes]:
        """Outputs of whole sequences."""
        span = self._checks.span(message.revision, message.start, message.end)
        layout = self._checks.layout(message)
        self._checks.payload(layout.tokens, message.format, message.dtype, payload)
        cache = SessionCache(self._model.narrowed(span), self.adapter(peer, span, message.adapters))
        await self._warm_up(message.format, message.reply_format)
        outcome = await self._engine.compute(
            requests.forward_work(
                peer, None, cache, layout, payload, message.format, message.dtype, message.reply_format
            )
        )
        reply = messages.ForwardReply(message.reply_format, self._dtype, outcome.milliseconds)
        return reply, outcome.payload

    async def backward(
        self, peer: str, message: messages.BackwardRequest, payload: Bytes
    ) -> tuple[messages.BackwardReply, Bytes]:
        """Gradients of inputs and adapters."""
        span = self._checks.span(message.revision, message.start, message.end)
        layout = self._checks.layout(message)
        self._checks.gradients(layout.tokens, message, payload)
        await self._warm_up(message.format, message.gradient_format)
        outcome = await self._engine.compute(
            requests.backward_work(
                peer,
                self._model.narrowed(span),
                self.adapter(peer, span, message.adapters),
                layout,
                payload,
                message.format,
                message.gradient_format,
                message.dtype,
            )
        )
        reply = messages.BackwardReply(message.gradient_format, self._dtype, outcome.milliseconds)
        return reply, outcome.payload

    async def put(self, peer: str, message: messages.PutAdapters, payload: Bytes) -> messages.AdaptersStored:
        """Check adapters and keep them. Raises `AdapterRefused`, `CacheFull`, or what `unpack_adapters` raises."""
        self.adapters.check(message, self._model.hidden_size)
        named = [(number, block) for number, block in enumerate(message.blocks, message.start) if block is not None]
        held = self._model.span
        if any(number not in held for number, _ in named):
            raise WrongSpan(f"adapters came for blocks from {message.start} on, this server holds {held}")

        def parts() -> list[BlockAdapterWeights]:
            described = [block for _, block in named]
            return unpack_adapters(described, payload, message.dtype, self._model.hidden_size, self._model.device)

        unpacked = parts() if len(payload) <= MAX_INLINE_BYTES else await self._engine.compute_thread.run(parts)
        for (number, _), part in zip(named, unpacked, strict=True):
            self._model.adapted.validate(number, part)
        found = zip(named, unpacked, strict=True)
        self.adapters.put(peer, {(number, block.digest): part for (number, block), part in found})
        return messages.AdaptersStored(self.adapters.limits.seconds)

    async def _warm_up(self, *formats: WireFormat) -> None:
        """Load what 8 bits need before a token's turn in the queue, not in the middle of it."""
        if WireFormat.BLOCKWISE8 in formats and not self._warm:
            await self._engine.compute_thread.run(load_quantizer, self._model.device)
            self._warm = True

    @property
    def _dtype(self) -> str:
        return dtype_name(self._model.dtype)
