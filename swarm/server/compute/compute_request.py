"""What the engine computes, and how it is decoded from a message and encoded for the reply."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.models.adapters.adapter_batch import AdapterWeights
from swarm.models.execution.gradients import SpanGradients
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.protocol.compression import decode_tensor, encode_tensor, pack_gradients, payload_bytes
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS

Bytes = bytes | memoryview


@dataclass(frozen=True)
class ForwardWork:
    """A step of a session, or a forward that keeps nothing.

    Attributes:
        peer: the client.
        session: whose share of the compute time it counts towards.
        cache: the session's cache, or an empty one that is dropped afterwards.
        layout: which sequences bring tokens.
        decode: turns the payload into packed inputs `[tokens, hidden]`.
        encode: turns the outputs into the reply's payload.
        training: part of a training step, so that no generation waits for it.
        exits: where its tokens may leave early, and have left; None if all pass every block.
        urgent: the client waits for it; else it may have what it needs from the blocks before.
        weight: as how many sessions its session counts.
    """

    peer: str
    session: Hashable
    cache: SessionCache
    layout: StepLayout
    decode: Callable[[], torch.Tensor]
    encode: Callable[[torch.Tensor], Bytes]
    training: bool = False
    exits: StepExits | None = None
    urgent: bool = True
    weight: float = 1.0

    @property
    def span(self) -> Span:
        return self.cache.model.span

    @property
    def joins_parts(self) -> bool:
        """Whether it can be computed together with requests for other parts of the blocks that the server holds."""
        return self.cache.model.joins_parts

    @property
    def token_cost(self) -> float:
        """What a token costs at most, in blocks."""
        return self.cache.model.token_cost(self.exits.terms if self.exits is not None else None)

    @property
    def kind(self) -> str:
        """One of `swarm.metrics.server.KINDS`. A few tokens count as a prompt where a sequence starts with them."""
        if self.training:
            return "forward"
        short = max(self.layout.counts) <= MAX_SHORT_TOKENS
        return "decode" if short and min(self.layout.starts) > 0 else "prefill"


@dataclass(frozen=True)
class BackwardWork:
    """Gradients of a forward, computed in one piece. The fields are those of `ForwardWork`, except for `decode`.

    Attributes:
        decode: turns the payload into inputs and gradients of the outputs, each `[tokens, hidden]`.
    """

    peer: str
    session: Hashable
    model: SpanModel
    adapter: AdapterWeights
    layout: StepLayout
    decode: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    encode: Callable[[SpanGradients], Bytes]
    training: bool = True
    kind: ClassVar[str] = "backward"
    urgent: ClassVar[bool] = True
    weight: ClassVar[float] = 1.0
    joins_parts: ClassVar[bool] = False

    @property
    def span(self) -> Span:
        return self.model.span

    @property
    def token_cost(self) -> float:
        """What a token costs, in blocks."""
        return self.model.token_cost()


@dataclass(frozen=True)
class ComputeResult:
    """The outcome of one piece of work.

    Attributes:
        payload: the encoded outputs.
        milliseconds: time spent in the blocks, including the other requests of the same iterations.
        left: for each sequence, the block in front of which its token has left; 0 if it has not.
    """

    payload: Bytes
    milliseconds: float
    left: tuple[int, ...] = ()


def forward_work(
    peer: str,
    session_id: bytes | None,
    cache: SessionCache,
    layout: StepLayout,
    payload: Bytes,
    wire: WireFormat,
    dtype: str,
    reply_wire: WireFormat | None,
    exits: StepExits | None = None,
    urgent: bool = True,
    weight: float = 1.0,
) -> ForwardWork:
    """A request for the outputs in the format `reply_wire`, or for no outputs if that is None.

    Without a session it is a forward that keeps nothing: training, or other work that is not generation.
    """
    model = cache.model

    def decode() -> torch.Tensor:
        return decode_tensor(payload, layout.tokens, model.hidden_size, wire, dtype, model.device)

    def encode(output: torch.Tensor) -> Bytes:
        return encode_tensor(output, reply_wire) if reply_wire is not None else b""

    training = session_id is None
    return ForwardWork(peer, (peer, session_id), cache, layout, decode, encode, training, exits, urgent, weight)


def backward_work(
    peer: str,
    model: SpanModel,
    adapter: AdapterWeights,
    layout: StepLayout,
    payload: Bytes,
    wire: WireFormat,
    gradient_wire: WireFormat,
    dtype: str,
) -> BackwardWork:
    """A request for gradients: of the inputs, in the format `gradient_wire`, then of the adapter's tensors.

    Args:
        payload: inputs, followed by gradients of the outputs.
    """
    length = payload_bytes(layout.tokens * model.hidden_size, wire, dtype)

    def decode() -> tuple[torch.Tensor, torch.Tensor]:
        whole = memoryview(payload)
        shape = layout.tokens, model.hidden_size
        return (
            decode_tensor(whole[:length], *shape, wire, dtype, model.device),
            decode_tensor(whole[length:], *shape, gradient_wire, dtype, model.device),
        )

    def encode(gradients: SpanGradients) -> Bytes:
        parts = [tensor for block in sorted(gradients.parts) for tensor in gradients.parts[block]]
        return b"".join((encode_tensor(gradients.inputs, gradient_wire), pack_gradients(parts)))

    return BackwardWork(peer, (peer, None), model, adapter, layout, decode, encode)
