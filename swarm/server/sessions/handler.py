"""What a server does with each message: decode, validate, refuse, pass on. Computing is the engine's.

Laws:
- Whatever a peer sends, the answer is a reply or a typed `Refusal` to the one that has to act: to that peer, or, for a
  pushed step, to the client whose session it is.
- A refused step changes nothing; the session goes on with a right one.
- A frame that is no message ends the connection, because nothing after it can be trusted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from swarm.common.version import VERSION
from swarm.data_structures import StepLayout, WireFormat
from swarm.errors import (
    CacheFull,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    ServerClosing,
    ServerFault,
    TooLong,
    UnknownSession,
    WrongPosition,
)
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import dtype_name, load_quantizer
from swarm.protocol.framing import Frame
from swarm.server.compute import compute_request as requests
from swarm.server.compute.compute_request import Bytes
from swarm.server.compute.engine import Engine
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.push import PushLink
from swarm.server.sessions.reply_stream import ReplyStream
from swarm.server.sessions.request_validation import RequestLimits, RequestValidator
from swarm.server.sessions.session_table import Session, SessionTable
from swarm.server.sessions.stateless_requests import StatelessRequests
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

NOTICE_TIMEOUT_S = 1.0
"""Seconds that a client gets to read that this server is leaving."""

PUSHED_REPLY_DELAY_S = 1e-3
"""Seconds between a push and the client's copy of it. The next server waits for the one, nobody for the other; sent at
once, it would be in the way of the push (a quarter of its time on one machine), and of those of other sessions."""


class MessageHandler:
    """Answers the streams of all peers of one server.

    Args:
        observer: hears of messages, refusals and what travels.

    Attributes:
        closing: no new sessions, forwards and backwards are accepted, and nobody waits for room any more.
        closed: no steps either.
    """

    def __init__(
        self,
        network: Network,
        model: SpanModel,
        revision: str,
        sessions: SessionTable,
        engine: Engine,
        limits: RequestLimits | None = None,
        adapters: AdapterStore | None = None,
        observer: ServerObserver | None = None,
    ) -> None:
        self.closed = False
        self._closing = False
        self._network = network
        self._model = model
        self._sessions = sessions
        self._engine = engine
        self._observer = observer or ServerObserver()
        self._limits = limits or RequestLimits()
        self._checks = RequestValidator(model, revision, self._limits)
        kept = adapters if adapters is not None else AdapterStore(time.monotonic)
        self._training = StatelessRequests(model, self._checks, engine, kept)
        self._streams: dict[str, set[ReplyStream]] = {}
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def closing(self) -> bool:
        return self._closing

    @closing.setter
    def closing(self, closing: bool) -> None:
        self._closing = closing
        if closing:
            self._sessions.refuse_waiting()

    async def idle(self) -> None:
        """Return when every request that has come is answered."""
        await self._idle.wait()

    async def hand_over(self) -> None:
        """Tell the clients of all sessions to find another server. Their sessions still work until `closed`."""
        notice = messages.refusal(ServerClosing("this server is leaving; use another one"))

        async def tell(client: Stream) -> None:
            with suppress(PeerLost, TimeoutError):
                async with asyncio.timeout(NOTICE_TIMEOUT_S):
                    await client.send(notice)

        await asyncio.gather(*map(tell, self._sessions.clients()))

    def hang_up(self) -> None:
        """Accept nothing any more and break off all conversations, so that nothing keeps the blocks in memory."""
        self.closing = self.closed = True
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.close()
        self._sessions.clear()
        self._training.adapters.clear()

    async def __call__(self, raw: Stream) -> None:
        """Serve one stream until the peer closes it, sends garbage or reads no answers."""
        stream = ReplyStream(raw)
        streams = self._streams.setdefault(stream.peer_id, set())
        streams.add(stream)
        conversation = _StreamState()
        try:
            if len(streams) > self._limits.streams:
                streams.discard(stream)  # it has no place while it hears that it gets none
                await self._reject(stream, CacheFull(f"a peer may open {self._limits.streams} streams"))
                await stream.discard_incoming()
                return
            while not conversation.over:
                frame = await stream.receive(self._training.max_payload)
                self._answering += 1
                self._idle.clear()
                try:
                    await self._answer(stream, frame, conversation)
                finally:
                    self._answering -= 1
                    if not self._answering:
                        self._idle.set()
        except ProtocolViolation as error:
            await self._reject(stream, error)
        finally:
            streams.discard(stream)
            if not streams:
                self._streams.pop(stream.peer_id, None)
            if conversation.session is not None:
                self._sessions.detach(conversation.session, stream)

    async def _reject(self, stream: ReplyStream, error: RemoteError) -> None:
        """Say why the connection ends."""
        self._observer.request_refused(error.code)
        await stream.send(messages.refusal(error))

    async def _answer(self, stream: ReplyStream, frame: Frame, conversation: _StreamState) -> None:
        message = messages.decode_client(frame.header)
        self._observer.message_received(type(message).__name__, len(frame.payload))
        try:
            reply, payload = await self._handle(stream, message, frame.payload, conversation)
        except ProtocolViolation:
            raise
        except Exception as error:
            step = message.step if isinstance(message, messages.StepRequest) else None
            reply, payload = self._refusal(error, message, stream.peer_id, step), b""
        if reply is not None:
            try:
                await self._tell(stream, reply, payload)
            except PeerTimeout:
                raise
            except PeerLost:  # a client that has hung up may have said before that its session is over
                pass

    def _refusal(self, error: Exception, message: messages.Message, client: str, step: int | None) -> messages.Refusal:
        """What the client is told of an error; what went wrong inside is for this server's log alone."""
        if not isinstance(error, RemoteError):
            kind, peer = type(message).__name__, client[-6:]
            extra = {"request": kind, "peer": peer}
            logger.error("a %s of peer …%s failed", kind, peer, exc_info=error, extra=extra)
            error = ServerFault("the computation failed at this server; its log says why")
        self._observer.request_refused(error.code)
        return messages.refusal(error, step)

    async def _handle(
        self, stream: ReplyStream, message: messages.ClientMessage, payload: Bytes, conversation: _StreamState
    ) -> tuple[messages.Message | None, Bytes]:
        match message:
            case messages.StepRequest():
                return await self._step(conversation.current(), message, payload, asked_by_client=True)
            case messages.PushRequest():
                return await self._pushed(stream.peer_id, message, payload)
            case messages.ReplayRequest():
                return await self._replay(conversation.current(), message, payload)
            case messages.OpenSession():
                return await self._open(stream, message, conversation), b""
            case messages.SetNeighbors():
                self._link(conversation.current(), message)
                return None, b""
            case messages.CloseSession():
                if conversation.session is not None:
                    self._sessions.close(conversation.session)
                conversation.over = True
                return None, b""
            case messages.ForwardRequest():
                self._check_open()
                return await self._training.forward(stream.peer_id, message, payload)
            case messages.BackwardRequest():
                self._check_open()
                return await self._training.backward(stream.peer_id, message, payload)
            case messages.PutAdapters():
                self._check_open()
                return await self._training.put(stream.peer_id, message, payload), b""
            case messages.InfoRequest():
                return self._info(), b""
            case messages.ProbeRequest():
                return self._probe(message, payload)

    async def _open(
        self, stream: ReplyStream, message: messages.OpenSession, conversation: _StreamState
    ) -> messages.Message:
        self._check_open()
        if conversation.session is not None:
            raise ProtocolViolation("a stream carries one session; open another stream")
        span = self._checks.span(message.revision, message.start, message.end)
        if message.max_length > self._sessions.capacity:
            raise TooLong(
                f"a session of {message.max_length} tokens is longer than the {self._sessions.capacity} tokens of "
                "this server's whole cache"
            )
        adapter = self._training.adapter(stream.peer_id, span, message.adapters)
        fresh = Session(
            session_id=message.session_id,
            peer_id=stream.peer_id,
            span=span,
            max_length=message.max_length,
            reply_format=message.reply_format,
            cache=SessionCache(self._model.narrowed(span), adapter),
            adapters=message.adapters,
            last_seen=0.0,
            patience=message.wait_timeout_s,
        )
        if message.reply_format is WireFormat.BLOCKWISE8:
            await self._engine.compute_thread.run(load_quantizer, self._model.device)
        try:
            conversation.session = await self._sessions.open(fresh, message.sequences, stream)
        except CacheFull:
            self._check_open()  # or is it that this server leaves?
            raise
        return messages.SessionOpened(conversation.session.next_step)

    def _link(self, session: Session, message: messages.SetNeighbors) -> None:
        self._sessions.check(session)  # nobody would end the link of a session that is forgotten
        session.unlink()
        session.let_push(message.previous_peer)
        if message.next_peer is not None and message.next_session_id is not None:
            session.link = PushLink(self._network, session.peer_id, message.next_peer, message.next_session_id)

    async def _step(
        self, session: Session, message: messages.StepRequest, payload: Bytes, *, asked_by_client: bool
    ) -> tuple[messages.StepReply | None, Bytes]:
        """Compute a step, push its outputs on, and return what the client is to be told.

        A step that was computed already is answered again from what was kept, if it is the client that asks again.
        """
        fingerprint = hash((messages.encode(message), payload))
        async with session.lock:
            if session.last is not None and message.step == session.last[1].step and fingerprint == session.last[0]:
                # The reply was lost on its way, or the client and the server before have both delivered the step.
                return session.last[1:] if asked_by_client else (None, b"")
            if message.step < session.next_step and not asked_by_client:
                return None, b""  # a push that the client has overtaken
            if self.closed:
                raise ServerClosing("this server is leaving; use another one")
            if message.step < session.next_step:
                raise WrongPosition(f"step {message.step} came where step {session.next_step} was expected")
            layout = self._checks.layout(message)
            output, milliseconds = await self._extend(session, message, layout, payload, session.reply_format)
            reply = messages.StepReply(message.step, session.reply_format, self._dtype, milliseconds)
            session.last = fingerprint, reply, output
            session.next_step = message.step + 1
        return await self._push_on(session, message, reply, output), output

    async def _push_on(
        self, session: Session, message: messages.StepRequest, reply: messages.StepReply, output: Bytes
    ) -> messages.StepReply:
        """Push first, because the next server waits for it; the client only keeps a copy."""
        link = session.link
        if link is None:
            return reply
        onward = messages.StepRequest(
            step=message.step,
            starts=message.starts,
            counts=message.counts,
            format=reply.format,
            dtype=reply.dtype,
            sources=message.sources,
            offsets=message.offsets,
        )
        pushed = await link.push(onward, output)
        self._observer.output_pushed(len(output), pushed)
        return messages.StepReply(reply.step, reply.format, reply.dtype, reply.compute_ms, pushed)

    async def _pushed(self, peer_id: str, message: messages.PushRequest, payload: Bytes) -> tuple[None, Bytes]:
        """A step from the server before. Whatever comes of it concerns the client, not the one that pushed."""
        session = await self._sessions.pushed_by(peer_id, message.client, message.session_id)
        reply: messages.Message | None
        output: Bytes
        try:
            reply, output = await self._step(session, message.step, payload, asked_by_client=False)
        except Exception as error:
            reply, output = self._refusal(error, message, message.client, message.step.step), b""
        if reply is not None and session.client is not None:
            with suppress(PeerLost):  # a client that is away may ask again
                await self._tell(session.client, reply, output)
        return None, b""

    async def _replay(
        self, session: Session, message: messages.ReplayRequest, payload: Bytes
    ) -> tuple[messages.ReplayReply, Bytes]:
        async with session.lock:
            if self.closed:
                raise ServerClosing("this server is leaving; use another one")
            layout = self._checks.layout(message)
            wanted = session.reply_format if message.return_outputs else None
            output, milliseconds = await self._extend(session, message, layout, payload, wanted)
            session.last = None
            session.next_step = message.next_step
            return messages.ReplayReply(session.reply_format, self._dtype, milliseconds), output

    async def _extend(
        self,
        session: Session,
        message: messages.StepRequest | messages.ReplayRequest,
        layout: StepLayout,
        payload: Bytes,
        wanted: WireFormat | None,
    ) -> tuple[Bytes, float]:
        """Check what is to be appended to the session's cache, append it, and encode the outputs if they are wanted."""
        self._sessions.check(session)  # one that is closed remembers nothing, so any step would seem wrong
        self._checks.length(layout, session.max_length)
        self._checks.payload(layout.tokens, message.format, message.dtype, payload)
        session.cache.validate_layout(layout)
        await self._sessions.reserve(session, layout.sequences)
        outcome = await self._engine.compute(
            requests.forward_work(
                session.peer_id,
                session.session_id,
                session.cache,
                layout,
                payload,
                message.format,
                message.dtype,
                wanted,
            )
        )
        return outcome.payload, outcome.milliseconds

    def _info(self) -> messages.InfoReply:
        span = self._model.span
        return messages.InfoReply(span.start, span.end, max(0, self._sessions.free), len(self._sessions), VERSION)

    def _probe(self, message: messages.ProbeRequest, payload: Bytes) -> tuple[messages.ProbeReply, bytes]:
        if len(payload) > messages.MAX_PROBE_BYTES:
            raise TooLong(f"a probe of {len(payload)} bytes; at most {messages.MAX_PROBE_BYTES} are answered")
        return messages.ProbeReply(), bytes(message.reply_bytes)

    async def _tell(self, stream: ReplyStream, reply: messages.Message, payload: Bytes) -> None:
        """Send an answer; the copy of what was pushed on lets that go first."""
        if isinstance(reply, messages.StepReply) and reply.pushed:
            await stream.send_later(PUSHED_REPLY_DELAY_S, reply, payload)
        else:
            await stream.send(reply, payload)
        self._observer.payload_sent(len(payload))

    def _check_open(self) -> None:
        if self.closing:
            raise ServerClosing("this server is leaving; use another one")

    @property
    def _dtype(self) -> str:
        return dtype_name(self._model.dtype)


@dataclass
class _StreamState:
    """What one stream has agreed on so far."""

    session: Session | None = None
    over: bool = False

    def current(self) -> Session:
        """The stream's session. Raises `UnknownSession` if none was opened."""
        if self.session is None:
            raise UnknownSession("a session has to be opened on this stream first")
        return self.session
