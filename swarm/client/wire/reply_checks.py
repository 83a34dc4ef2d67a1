"""What a server may answer: how much, how soon, and what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_timeout import TimeoutEstimator
from swarm.data_structures import Hop
from swarm.errors import NotFinite, PeerLost, PeerTimeout, ProtocolViolation, WrongDtype, WrongShape, remote_error
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import gradient_bytes, unpack_gradients
from swarm.protocol.compression import is_finite, payload_bytes
from swarm.protocol.framing import Frame

ASSUMED_ROUND_TRIP_S = 0.1
"""Seconds assumed for the way to a server and back before anything was measured."""


@dataclass(frozen=True, slots=True)
class OutputShape:
    """How much an answer has to hold: hidden states `[tokens, hidden_size]`."""

    tokens: int
    hidden_size: int

    @property
    def values(self) -> int:
        return self.tokens * self.hidden_size


@asynccontextmanager
async def reply_deadline(hop: Hop, patience: float) -> AsyncIterator[None]:
    """An exchange with a server that has to end within `patience` seconds. Raises `PeerTimeout` or `PeerLost`."""
    try:
        async with asyncio.timeout(patience):
            yield
    except TimeoutError:
        raise PeerTimeout(f"{describe_hop(hop)} did not answer within {patience:.1f} s") from None
    except PeerLost as error:
        raise PeerLost(f"{describe_hop(hop)} is gone: {error}") from None


def parse_reply(hop: Hop, frame: Frame) -> messages.ServerMessage:
    """The header of an answer. A refusal is raised."""
    reply = messages.decode_server(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"{describe_hop(hop)} refused: {reply.message}")
    return reply


def initial_estimate(hop: Hop, slowness: float, limit: float) -> TimeoutEstimator:
    """What a server announces of itself is all that is known of work that it has not done yet."""
    blocks, server = hop.span.length, hop.server
    step = ASSUMED_ROUND_TRIP_S + server.queue_delay + blocks / max(server.throughput, 1e-3)
    token = blocks / max(server.forward_throughput or server.throughput, 1e-3)
    if server.network_throughput:
        token += 2 / server.network_throughput
    return TimeoutEstimator(slowness * step, slowness * token, limit)


def validate_outputs(
    hop: Hop,
    due: OutputShape,
    payload: bytes | memoryview,
    reply: messages.StepReply | messages.ReplayReply | messages.ForwardReply | messages.BackwardReply,
) -> PackedHidden:
    """The outputs in an answer. Raises `ProtocolViolation` if they are not as many as are due, or not finite."""
    try:
        length = payload_bytes(due.values, reply.format, reply.dtype)
    except WrongDtype as error:
        raise ProtocolViolation(f"{describe_hop(hop)} answered in an unknown format: {error}") from None
    if len(payload) != length:
        raise ProtocolViolation(f"{describe_hop(hop)} answered with {len(payload)} bytes where {length} were due")
    if not is_finite(payload, due.values, reply.format, reply.dtype):
        raise ProtocolViolation(f"{describe_hop(hop)} answered with values that are not finite")
    return PackedHidden(payload, due.tokens, due.hidden_size, reply.format, reply.dtype)


def validate_gradients(
    hop: Hop,
    due: OutputShape,
    adapters: Sequence[messages.BlockAdapterSpec],
    payload: bytes | memoryview,
    reply: messages.BackwardReply,
) -> tuple[PackedHidden, list[list[torch.Tensor]]]:
    """The gradients in a reply: of the inputs, and of each adapter's tensors. Raises as `validate_outputs` does."""
    view, length = memoryview(payload), gradient_bytes(adapters, due.hidden_size)
    first = max(0, len(view) - length)
    inputs = validate_outputs(hop, due, view[:first], reply)
    try:
        return inputs, unpack_gradients(adapters, view[first:], due.hidden_size)
    except (WrongShape, NotFinite) as error:
        raise ProtocolViolation(f"{describe_hop(hop)} answered with wrong gradients: {error}") from None


def unexpected_reply(hop: Hop, reply: messages.ServerMessage) -> ProtocolViolation:
    """An answer that is right in itself, but not here."""
    return ProtocolViolation(f"{describe_hop(hop)} answered with a {type(reply).__name__} out of place")


def describe_hop(hop: Hop) -> str:
    """The server, for people."""
    return f"server {hop.server.short_id} (blocks {hop.span})"
