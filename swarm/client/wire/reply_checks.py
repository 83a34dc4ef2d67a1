"""Checks of a server's reply: did it come in time, is it of the right kind, are its contents valid."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.data_structures import Hop
from swarm.errors import (
    NotFinite,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    WrongDtype,
    WrongShape,
    remote_error,
)
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import gradient_bytes, unpack_gradients
from swarm.protocol.compression import is_finite, payload_bytes
from swarm.protocol.framing import Frame

ASSUMED_ROUND_TRIP_S = 0.1
"""Round trip to a server in seconds that is assumed before anything was measured."""


@dataclass(frozen=True, slots=True)
class AllowedExits:
    """Where the tokens of a step may leave inside a span.

    Attributes:
        counts: tokens of each sequence, at most one.
        blocks: in front of which they may leave, as the server was asked.
    """

    counts: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputShape:
    """Shape of the hidden states that a reply has to hold: `[tokens, hidden_size]`.

    Attributes:
        exits: where tokens may have left; None if they have to have passed all blocks.
        values: number of values.
    """

    tokens: int
    hidden_size: int
    exits: AllowedExits | None = None
    values: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.tokens * self.hidden_size)


class ReplyDeadline:
    """Limits an exchange with a server to some seconds. Raises `PeerTimeout` or `PeerLost`, which name the hop.

    Not made by `asynccontextmanager`: on Python 3.13, the frames of that keep an error of the exchange in a cycle,
    and with it all that the session knows.
    """

    def __init__(self, hop: Hop, seconds: float) -> None:
        self._hop = hop
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_late = isinstance(error, TimeoutError)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            is_late = True
        if is_late:
            raise PeerTimeout(f"{describe_hop(self._hop)} did not answer within {self._seconds:.1f} s") from None
        if isinstance(error, PeerLost):
            raise PeerLost(f"{describe_hop(self._hop)} is gone: {error}") from None


def parse_reply(hop: Hop, frame: Frame) -> messages.ServerMessage:
    """The header of a reply. A refusal is raised as the `RemoteError` that its code names."""
    reply = messages.decode_server(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"{describe_hop(hop)} refused: {reply.message}")
    return reply


def initial_estimate(hop: Hop, slowness: float, limit: float) -> TimeoutEstimator:
    """The timeout estimator of a server that has not replied yet: it starts from what the server announces.

    Of many tokens at once, none takes longer than one alone: who announces quick steps gets no more time for prompts.

    Args:
        slowness: how many times longer than announced the server may take.
        limit: upper limit of every timeout in seconds.
    """
    blocks, server = hop.span.length, hop.server
    step = ASSUMED_ROUND_TRIP_S + server.queue_delay + blocks / max(server.throughput, 1e-3)
    token = blocks / max(server.forward_throughput, server.throughput, 1e-3)
    if server.network_throughput:
        token += 2 / server.network_throughput
    return TimeoutEstimator(slowness * step, slowness * token, limit)


def validate_outputs(
    hop: Hop,
    shape: OutputShape,
    payload: bytes | memoryview,
    reply: messages.StepReply | messages.ReplayReply | messages.ForwardReply | messages.BackwardReply,
) -> PackedHidden:
    """The outputs in a reply. Raises `ProtocolViolation` if they do not have this shape, `NotFiniteOutputs` if they are
    not finite."""
    try:
        length = payload_bytes(shape.values, reply.format, reply.dtype)
    except WrongDtype as error:
        raise ProtocolViolation(f"{describe_hop(hop)} answered in an unknown format: {error}") from None
    if len(payload) != length:
        raise ProtocolViolation(f"{describe_hop(hop)} answered with {len(payload)} bytes where {length} were due")
    if not is_finite(payload, shape.values, reply.format, reply.dtype):
        raise NotFiniteOutputs(f"{describe_hop(hop)} answered with values that are not finite")
    return PackedHidden(payload, shape.tokens, shape.hidden_size, reply.format, reply.dtype)


def validate_left(
    hop: Hop, first: int, allowed: AllowedExits | None, left: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Where tokens have left, as a reply says. Raises `ProtocolViolation` if they cannot have left there.

    Only what happened in the span is judged. Of tokens that left before, the server repeats what it was told, perhaps
    by a server that is lost now and whose successor has found otherwise.

    Args:
        first: first block of the route.
        allowed: what the server was asked; None if nothing may leave.
        left: what the reply says; None if no token has left.
    """
    if left is None:
        return None
    told = f"{describe_hop(hop)} answered that tokens have left in front of blocks {list(left)}"
    if allowed is None:
        raise ProtocolViolation(f"{told}, which it was not asked for")
    if len(left) != len(allowed.counts):
        raise ProtocolViolation(f"{told}, for a step of {len(allowed.counts)} sequences")
    for row, (block, count) in enumerate(zip(left, allowed.counts, strict=True)):
        is_possible = first < block <= hop.span.start or (block in allowed.blocks and block <= hop.span.end)
        if block and not (count == 1 and is_possible):
            raise ProtocolViolation(f"{told}; sequence {row} cannot have left there")
    return tuple(left)


def validate_gradients(
    hop: Hop,
    shape: OutputShape,
    adapters: Sequence[messages.BlockAdapterSpec],
    payload: bytes | memoryview,
    reply: messages.BackwardReply,
) -> tuple[PackedHidden, list[list[torch.Tensor]]]:
    """The gradients in a reply: of the inputs, and of each adapter's tensors. Raises as `validate_outputs` does."""
    view, length = memoryview(payload), gradient_bytes(adapters, shape.hidden_size)
    first = max(0, len(view) - length)
    inputs = validate_outputs(hop, shape, view[:first], reply)
    try:
        return inputs, unpack_gradients(adapters, view[first:], shape.hidden_size)
    except (WrongShape, NotFinite) as error:
        raise ProtocolViolation(f"{describe_hop(hop)} answered with wrong gradients: {error}") from None


def unexpected_reply(hop: Hop, reply: messages.ServerMessage) -> ProtocolViolation:
    """The error for a valid reply that does not answer the request."""
    return ProtocolViolation(f"{describe_hop(hop)} answered with an unexpected {type(reply).__name__}")


def describe_hop(hop: Hop) -> str:
    """The server and its blocks, for error messages and logs."""
    return f"server {hop.server.short_id} (blocks {hop.span})"
