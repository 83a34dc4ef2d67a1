"""What a server does with each message: decode, validate, refuse, pass on. It never computes in the network loop.

Laws:
- Whatever a client sends, the answer is a reply or a typed `Refusal` to that client alone.
- A refused step changes nothing; the session goes on with a right one.
- A frame that is no message ends the connection, because nothing after it can be trusted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.errors import (
    ProtocolViolation,
    RemoteError,
    ServerClosing,
    ServerFault,
    TooLong,
    UnknownSession,
    WrongPosition,
    WrongShape,
    WrongSpan,
)
from swarm.models.span import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import dtype_name, pack, payload_length, unpack
from swarm.protocol.framing import Frame
from swarm.server.kv_cache import SessionCache, forward_packed
from swarm.server.runtime import Runtime
from swarm.server.sessions import Session, Sessions
from swarm.transport.stream import Stream
from swarm.version import VERSION

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        step_tokens: tokens in one step or forward.
        streams: connections that one peer may have open.
    """

    step_tokens: int = 16384
    streams: int = 64


class Handler:
    """Answers the streams of all clients of one server."""

    def __init__(
        self, model: SpanModel, revision: str, sessions: Sessions, runtime: Runtime, limits: Limits | None = None
    ) -> None:
        self.closing = False
        self._model = model
        self._revision = revision
        self._sessions = sessions
        self._runtime = runtime
        self._limits = limits or Limits()
        self._max_payload = max(self._limits.step_tokens * model.hidden_size * 4, messages.MAX_PROBE)
        self._open_streams: dict[str, int] = {}
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Return when every request that has come is answered."""
        await self._idle.wait()

    async def __call__(self, stream: Stream) -> None:
        """Serve one stream until the client closes it or sends garbage."""
        peer = stream.peer_id
        self._open_streams[peer] = self._open_streams.get(peer, 0) + 1
        conversation = _Conversation()
        try:
            if self._open_streams[peer] > self._limits.streams:
                await stream.send(messages.refusal(ServerFault(f"a peer may open {self._limits.streams} streams")))
                return
            while not conversation.over:
                frame = await stream.receive(self._max_payload)
                self._answering += 1
                self._idle.clear()
                try:
                    await self._answer(stream, frame, conversation)
                finally:
                    self._answering -= 1
                    if not self._answering:
                        self._idle.set()
        except ProtocolViolation as error:
            await stream.send(messages.refusal(error))
        finally:
            self._open_streams[peer] -= 1
            if not self._open_streams[peer]:
                del self._open_streams[peer]
            if conversation.session is not None:
                self._sessions.detach(conversation.session)

    async def _answer(self, stream: Stream, frame: Frame, conversation: _Conversation) -> None:
        message = messages.decode_client(frame.header)
        try:
            reply, payload = await self._handle(stream.peer_id, message, frame, conversation)
        except ProtocolViolation:
            raise
        except RemoteError as error:
            reply, payload = messages.refusal(error), b""
        except Exception:
            logger.exception("a %s of peer …%s failed", type(message).__name__, stream.peer_id[-6:])
            reply = messages.refusal(ServerFault("the computation failed at this server; its log says why"))
            payload = b""
        if reply is not None:
            await stream.send(reply, payload)

    async def _handle(
        self, peer_id: str, message: messages.ClientMessage, frame: Frame, conversation: _Conversation
    ) -> tuple[messages.Message | None, bytes | memoryview]:
        match message:
            case messages.StepRequest():
                return await self._step(message, frame, conversation)
            case messages.OpenSession():
                return self._open(peer_id, message, conversation), b""
            case messages.CloseSession():
                if conversation.session is not None:
                    self._sessions.close(conversation.session)
                conversation.over = True
                return None, b""
            case messages.ForwardRequest():
                return await self._forward(message, frame.payload)
            case messages.InfoRequest():
                return self._info(), b""
            case messages.ProbeRequest():
                return self._probe(message, frame.payload)

    def _open(self, peer_id: str, message: messages.OpenSession, conversation: _Conversation) -> messages.SessionOpened:
        self._check_open()
        if conversation.session is not None:
            raise ProtocolViolation("a stream carries one session; open another stream")
        span = self._check_span(message.revision, message.start, message.end)
        if message.max_length > self._sessions.capacity:
            raise TooLong(
                f"a session of {message.max_length} tokens is longer than the {self._sessions.capacity} tokens of "
                "this server's whole cache"
            )
        fresh = Session(
            session_id=message.session_id,
            peer_id=peer_id,
            span=span,
            max_length=message.max_length,
            reply_format=message.reply_format,
            cache=SessionCache(self._model.narrowed(span)),
            last_seen=0.0,
        )
        conversation.session = self._sessions.open(fresh)
        return messages.SessionOpened(conversation.session.next_step)

    async def _step(
        self, message: messages.StepRequest, frame: Frame, conversation: _Conversation
    ) -> tuple[messages.StepReply, bytes | memoryview]:
        session = conversation.session
        if session is None:
            raise UnknownSession("a step came before its session was opened on this stream")
        payload = frame.payload
        fingerprint = hash((frame.header, payload))
        async with session.lock:
            if session.last is not None and message.step == session.next_step - 1 and fingerprint == session.last[0]:
                return session.last[1:]  # the reply was lost on its way: the same again, computed once
            self._check_open()
            if message.step != session.next_step:
                raise WrongPosition(f"step {message.step} came where step {session.next_step} was expected")
            layout = self._layout(message.starts, message)
            self._check_length(layout, session)
            self._check_payload(layout.tokens, message.format, message.dtype, payload)
            session.cache.check(layout)
            self._sessions.reserve(session, layout.rows)

            def compute() -> tuple[bytes | memoryview, float]:
                hidden = self._unpack(payload, layout.tokens, message.format, message.dtype)
                began = time.perf_counter()
                output = session.cache.step(hidden, layout)
                milliseconds = (time.perf_counter() - began) * 1e3
                return pack(output, session.reply_format), milliseconds

            result, milliseconds = await self._runtime.run(compute)
            reply = messages.StepReply(message.step, session.reply_format, dtype_name(self._model.dtype), milliseconds)
            session.last = fingerprint, reply, result
            session.next_step += 1
            return reply, result

    async def _forward(
        self, message: messages.ForwardRequest, payload: bytes | memoryview
    ) -> tuple[messages.ForwardReply, bytes | memoryview]:
        self._check_open()
        model = self._model.narrowed(self._check_span(message.revision, message.start, message.end))
        layout = self._layout([0] * len(message.counts), message)
        tokens = layout.tokens
        self._check_payload(tokens, message.format, message.dtype, payload)

        def compute() -> tuple[bytes | memoryview, float]:
            hidden = self._unpack(payload, tokens, message.format, message.dtype)
            began = time.perf_counter()
            output = forward_packed(model, hidden, layout)
            milliseconds = (time.perf_counter() - began) * 1e3
            return pack(output, message.reply_format), milliseconds

        result, milliseconds = await self._runtime.run(compute)
        return messages.ForwardReply(message.reply_format, dtype_name(self._model.dtype), milliseconds), result

    def _info(self) -> messages.InfoReply:
        span = self._model.span
        return messages.InfoReply(span.start, span.end, max(0, self._sessions.free), len(self._sessions), VERSION)

    def _probe(self, message: messages.ProbeRequest, payload: bytes | memoryview) -> tuple[messages.ProbeReply, bytes]:
        if len(payload) > messages.MAX_PROBE:
            raise TooLong(f"a probe of {len(payload)} bytes; at most {messages.MAX_PROBE} are answered")
        return messages.ProbeReply(), bytes(message.reply_bytes)

    def _check_open(self) -> None:
        if self.closing:
            raise ServerClosing("this server is leaving; use another one")

    def _check_span(self, revision: str, start: int, end: int) -> Span:
        held = self._model.span
        if not held.start <= start < end <= held.end:
            raise WrongSpan(f"blocks {start}:{end} were asked for, this server holds {held}")
        if revision != self._revision:
            raise WrongSpan(f"revision {revision} was asked for, this server holds revision {self._revision}")
        return Span(start, end)

    def _layout(self, starts: Sequence[int], message: messages.StepRequest | messages.ForwardRequest) -> StepLayout:
        """The rows of a request, if its lists agree about how many there are."""
        sources = message.sources if isinstance(message, messages.StepRequest) else None
        rows = len(message.counts)
        self._check_positions(starts, message)
        for name, values in (("starts", starts), ("sources", sources), ("offsets", message.offsets)):
            if values is not None and len(values) != rows:
                raise WrongShape(f"a request of {rows} rows has {len(values)} {name}")
        return StepLayout(
            tuple(starts),
            tuple(message.counts),
            tuple(sources) if sources is not None else None,
            tuple(message.offsets) if message.offsets is not None else None,
        )

    def _check_positions(self, starts: Sequence[int], message: messages.StepRequest | messages.ForwardRequest) -> None:
        """A position beyond a table of the model would fail in the middle of the computation; on a GPU, for all."""
        limit = self._model.positions
        if limit is None:
            return
        offsets = message.offsets or [0] * len(message.counts)
        for row, (start, count, offset) in enumerate(zip(starts, message.counts, offsets, strict=False)):
            if start + offset + count > limit:
                raise TooLong(f"row {row} reaches position {start + offset + count}; this model has {limit} positions")

    def _check_length(self, layout: StepLayout, session: Session) -> None:
        for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
            if start + count > session.max_length:
                raise TooLong(
                    f"row {row} would be {start + count} tokens long; the session was opened for {session.max_length}"
                )

    def _check_payload(self, tokens: int, wire: WireFormat, dtype: str, payload: bytes | memoryview) -> None:
        if not 0 < tokens <= self._limits.step_tokens:
            raise TooLong(f"{tokens} tokens in one request; this server takes 1 to {self._limits.step_tokens}")
        expected = payload_length(tokens * self._model.hidden_size, wire, dtype)
        if len(payload) != expected:
            raise WrongShape(
                f"{tokens} tokens of {self._model.hidden_size} values take {expected} bytes as {wire}, "
                f"got {len(payload)}"
            )

    def _unpack(self, payload: bytes | memoryview, tokens: int, wire: WireFormat, dtype: str) -> torch.Tensor:
        hidden = unpack(payload, tokens, self._model.hidden_size, wire, dtype, self._model.device)
        return hidden.to(self._model.dtype)


@dataclass
class _Conversation:
    """What one stream has agreed on so far."""

    session: Session | None = None
    over: bool = False
