"""The conversation with the servers of a route. Runs in the network loop; knows bytes, not tensors.

What one server answers is handed to the next as it came, so nothing is decoded on the way.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.data_structures import Hop, HopTiming, Route, StepLayout, WireFormat
from swarm.errors import PeerLost, ProtocolViolation, RequestRefused, ServerFault, remote_error
from swarm.protocol import messages
from swarm.protocol.compression import payload_length
from swarm.transport.stream import Network, Stream

CLOSE_TIMEOUT = 1.0
"""Seconds that a server gets to read that a session is over."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Hidden states `[tokens, hidden_size]` as they travel."""

    payload: bytes | memoryview
    tokens: int
    hidden_size: int
    wire: WireFormat
    dtype: str


@dataclass(frozen=True)
class Manner:
    """What a client asks of every server.

    Attributes:
        revision: the model's revision.
        wire: format of the replies.
        timeout: seconds to wait for one answer.
    """

    revision: str
    wire: WireFormat
    timeout: float


class HopSession:
    """One server's part of a session: blocks `hop.span`, over one stream."""

    def __init__(self, network: Network, hop: Hop, manner: Manner, max_length: int) -> None:
        self.hop = hop
        self._network = network
        self._manner = manner
        self._max_length = max_length
        self._session_id = secrets.token_bytes(16)
        self.timing: HopTiming | None = None
        """Of the last step."""
        self._stream: Stream | None = None
        self._next_step = 0
        self._interrupted = False
        """True while an answer is due, so that a late one is never taken for that to another request."""

    async def open(self) -> None:
        """Connect and reserve room. Raises `RemoteError` of the fitting kind."""
        self._stream = await self._network.open_stream(self.hop.server.peer_id)
        request = messages.OpenSession(
            session_id=self._session_id,
            revision=self._manner.revision,
            start=self.hop.span.start,
            end=self.hop.span.end,
            max_length=self._max_length,
            reply_format=self._manner.wire,
        )
        reply, _ = await _ask(self._stream, self.hop, request, b"", self._manner.timeout, 0)
        if not isinstance(reply, messages.SessionOpened):
            raise _out_of_place(self.hop, reply)
        self._next_step = reply.next_step

    async def step(self, hidden: Packed, layout: StepLayout) -> Packed:
        """Send the step's hidden states through this server's blocks."""
        if self._stream is None:
            raise PeerLost(f"{_whose(self.hop)} is not connected")
        if self._interrupted:
            raise PeerLost(f"an earlier step at {_whose(self.hop)} was interrupted; open a new session")
        request = messages.StepRequest(
            step=self._next_step,
            starts=list(layout.starts),
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            sources=_list(layout.sources),
            offsets=_list(layout.offsets),
        )
        limit = hidden.tokens * hidden.hidden_size * 4
        began = time.perf_counter()
        self._interrupted = True
        try:
            reply, payload = await _ask(self._stream, self.hop, request, hidden.payload, self._manner.timeout, limit)
        except (RequestRefused, ServerFault):
            self._interrupted = False
            raise
        self._interrupted = False
        if not isinstance(reply, messages.StepReply) or reply.step != self._next_step:
            raise _out_of_place(self.hop, reply)
        self.timing = HopTiming(time.perf_counter() - began, reply.compute_ms / 1e3)
        self._next_step += 1
        return _checked(self.hop, hidden, payload, reply.format, reply.dtype)

    async def close(self) -> None:
        """Free the session at the server, if it can still be told."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await stream.send(messages.CloseSession())
        except (PeerLost, TimeoutError):
            pass
        finally:
            stream.close()


class Chain:
    """An open session over all hops of a route."""

    def __init__(self, network: Network, route: Route, manner: Manner, max_length: int) -> None:
        self.route = route
        self.failed: set[str] = set()
        """Peers that refused or could not be reached when the chain was opened."""
        self._hops = [HopSession(network, hop, manner, max_length) for hop in route.hops]

    async def open(self) -> None:
        """Open all hops at once. If one refuses, the others are closed again."""
        results = await asyncio.gather(*(hop.open() for hop in self._hops), return_exceptions=True)
        errors = {hop: result for hop, result in zip(self._hops, results, strict=True) if result is not None}
        if errors:
            self.failed = {hop.hop.server.peer_id for hop in errors}
            await self.close()
            raise next(iter(errors.values()))

    async def step(self, hidden: Packed, layout: StepLayout) -> Packed:
        """One step through all blocks."""
        for hop in self._hops:
            hidden = await hop.step(hidden, layout)
        return hidden

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Of the last step, one a hop; empty before the first."""
        return tuple(hop.timing for hop in self._hops if hop.timing is not None)

    async def close(self) -> None:
        """Free the session everywhere."""
        await asyncio.gather(*(hop.close() for hop in self._hops))


async def forward(network: Network, hop: Hop, manner: Manner, hidden: Packed, layout: StepLayout) -> Packed:
    """Run packed sequences through one server's blocks; the server keeps nothing."""
    stream = await network.open_stream(hop.server.peer_id)
    try:
        request = messages.ForwardRequest(
            revision=manner.revision,
            start=hop.span.start,
            end=hop.span.end,
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            reply_format=manner.wire,
            offsets=_list(layout.offsets),
        )
        limit = hidden.tokens * hidden.hidden_size * 4
        reply, payload = await _ask(stream, hop, request, hidden.payload, manner.timeout, limit)
        if not isinstance(reply, messages.ForwardReply):
            raise _out_of_place(hop, reply)
        return _checked(hop, hidden, payload, reply.format, reply.dtype)
    finally:
        stream.close()


async def _ask(
    stream: Stream,
    hop: Hop,
    request: messages.Message,
    payload: bytes | memoryview,
    patience: float,
    max_payload: int,
) -> tuple[messages.ServerMessage, bytes | memoryview]:
    """Send a request and wait for its answer; a refusal is raised."""
    try:
        async with asyncio.timeout(patience):
            await stream.send(request, payload)
            frame = await stream.receive(max_payload)
    except TimeoutError:
        raise PeerLost(f"{_whose(hop)} did not answer within {patience:.0f} s") from None
    except PeerLost as error:
        raise PeerLost(f"{_whose(hop)} is gone: {error}") from None
    reply = messages.decode_server(frame.header)
    if isinstance(reply, messages.Refusal):
        raise remote_error(reply.code, f"{_whose(hop)} refused: {reply.message}")
    return reply, frame.payload


def _checked(hop: Hop, sent: Packed, payload: bytes | memoryview, wire: WireFormat, dtype: str) -> Packed:
    """The reply's hidden states, if they are as many as were sent."""
    try:
        expected = payload_length(sent.tokens * sent.hidden_size, wire, dtype)
    except Exception as error:
        raise ProtocolViolation(f"{_whose(hop)} answered in an unknown format: {error}") from None
    if len(payload) != expected:
        raise ProtocolViolation(f"{_whose(hop)} answered with {len(payload)} bytes where {expected} were due")
    return Packed(payload, sent.tokens, sent.hidden_size, wire, dtype)


def _out_of_place(hop: Hop, reply: messages.ServerMessage) -> ProtocolViolation:
    return ProtocolViolation(f"{_whose(hop)} answered with a {type(reply).__name__} out of place")


def _list(values: Sequence[int] | None) -> list[int] | None:
    return list(values) if values is not None else None


def _whose(hop: Hop) -> str:
    return f"server {hop.server.short_id} (blocks {hop.span})"
