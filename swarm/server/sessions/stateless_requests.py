"""Requests without a session: forwards and backwards over whole sequences, and the adapters for them.

Messages are validated and refused here; the engine computes. Nothing but adapters is kept between requests.
"""

from __future__ import annotations

from swarm.common.dtypes import dtype_name
from swarm.errors import WrongSpan
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.models.execution.session_cache import ForwardCache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import unpack_adapters
from swarm.server.compute import compute_request
from swarm.server.compute.compute_request import Bytes
from swarm.server.compute.engine import Engine
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.request_validation import RequestValidator

MAX_INLINE_BYTES = 1 << 20
"""Larger adapters are decoded in the compute thread; these take a millisecond or two in the network loop."""


class StatelessRequests:
    """Answers the stateless requests of one server's peers.

    Attributes:
        adapters: where adapters are kept.
    """

    def __init__(self, model: SpanModel, validator: RequestValidator, engine: Engine, adapters: AdapterStore) -> None:
        self.adapters = adapters
        self._model = model
        self._validator = validator
        self._engine = engine

    @property
    def max_payload(self) -> int:
        """Size in bytes that no valid payload exceeds."""
        return max(self._validator.max_payload, self.adapters.limits.peer_memory)

    async def run_forward(
        self, peer: str, message: messages.ForwardRequest, payload: Bytes
    ) -> tuple[messages.ForwardReply, Bytes]:
        """Compute the outputs of whole sequences."""
        span = self._validator.validate_span(message.revision, message.start, message.end)
        layout = self._validator.validate_layout(message)
        await self._validator.validate_payload(layout.tokens, message.format, message.dtype, payload)
        cache = ForwardCache(self._model.narrowed(span), layout, self.adapters.find(peer, span, message.adapters))
        await self._validator.load_formats(message.reply_format)
        result = await self._engine.compute(
            compute_request.forward_work(
                peer, None, cache, layout, payload, message.format, message.dtype, message.reply_format
            )
        )
        reply = messages.ForwardReply(message.reply_format, self._dtype, result.milliseconds)
        return reply, result.payload

    async def run_backward(
        self, peer: str, message: messages.BackwardRequest, payload: Bytes
    ) -> tuple[messages.BackwardReply, Bytes]:
        """Compute gradients of inputs and adapters."""
        span = self._validator.validate_span(message.revision, message.start, message.end)
        layout = self._validator.validate_layout(message)
        await self._validator.validate_gradients(layout.tokens, message, payload)
        result = await self._engine.compute(
            compute_request.backward_work(
                peer,
                self._model.narrowed(span),
                self.adapters.find(peer, span, message.adapters),
                layout,
                payload,
                message.format,
                message.reply_format,
                message.dtype,
            )
        )
        reply = messages.BackwardReply(message.reply_format, self._dtype, result.milliseconds)
        return reply, result.payload

    async def store_adapters(self, peer: str, message: messages.PutAdapters, payload: Bytes) -> messages.AdaptersStored:
        """Validate adapters and keep them. Raises `AdapterRefused`, `CacheFull`, or what `unpack_adapters` raises."""
        self.adapters.validate_size(message, self._model.hidden_size)
        named = [(number, block) for number, block in enumerate(message.blocks, message.start) if block is not None]
        held = self._model.span
        if any(number not in held for number, _ in named):
            raise WrongSpan(f"adapters came for blocks from {message.start} on, this server holds {held}")

        def unpack() -> list[BlockAdapterWeights]:
            described = [block for _, block in named]
            return unpack_adapters(described, payload, message.dtype, self._model.hidden_size, self._model.device)

        unpacked = unpack() if len(payload) <= MAX_INLINE_BYTES else await self._engine.compute_thread.run(unpack)
        for (number, _), part in zip(named, unpacked, strict=True):
            self._model.adapted.validate(number, part)
        found = zip(named, unpacked, strict=True)
        self.adapters.store(peer, {(number, block.digest): part for (number, block), part in found})
        return messages.AdaptersStored(self.adapters.limits.seconds)

    @property
    def _dtype(self) -> str:
        return dtype_name(self._model.dtype)
