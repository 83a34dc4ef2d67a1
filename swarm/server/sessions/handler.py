"""What a server does with each message: decode it, pass it on, and answer with a reply or a refusal.

Rules:
- Whatever a peer sends, the answer is a reply or a typed `Refusal`. It goes to the peer that has to act: the sender,
  or, for a pushed step, the client whose session it is.
- A refused step changes nothing; the session continues with a correct one.
- A frame that is not a valid message ends the connection, because nothing after it can be trusted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

from swarm.common.version import VERSION
from swarm.errors import (
    CacheFull,
    CacheReclaimed,
    MemoryFull,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    ServerClosing,
    ServerFault,
    TooLong,
    UnknownSession,
)
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.framing import Frame
from swarm.server.compute.compute_request import Bytes
from swarm.server.compute.engine import Engine
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.points_desk import PointsDesk
from swarm.server.sessions.push_link import PUSHED_REPLY_DELAY_S, DialBudget, PushLink
from swarm.server.sessions.receipt_issuer import ReceiptIssuer
from swarm.server.sessions.reply_stream import REFUSED_PAYLOAD_TIMEOUT_S, ReplyStream
from swarm.server.sessions.request_memory import Admission, RequestAccount
from swarm.server.sessions.request_validation import RequestLimits, RequestValidator
from swarm.server.sessions.session import Session, SessionTerms
from swarm.server.sessions.session_steps import SessionSteps
from swarm.server.sessions.session_table import SessionTable
from swarm.server.sessions.stateless_requests import StatelessRequests
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

NOTICE_TIMEOUT_S = 1.0
"""How long a client gets to read that this server is leaving."""


Answer = tuple[messages.Message | None, Bytes]
"""A reply, or None where the message is not answered, and its payload."""


class MessageHandler:
    """Answers the streams of all peers of one server.

    Args:
        observer: is told of messages, refusals and payloads.
        points: of this server; None for a desk of its own, which forgets.
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
        quantization: str = "none",
        points: PointsDesk | None = None,
    ) -> None:
        self._closing = False
        self._model = model
        self._sessions = sessions
        self._observer = observer or ServerObserver()
        self._limits = limits or RequestLimits()
        self._validator = RequestValidator(model, revision, self._limits)
        store = adapters if adapters is not None else AdapterStore(time.monotonic)
        self._engine = engine
        sessions.parked.run_later = engine.compute_thread.post
        self._steps = SessionSteps(sessions, engine, self._validator, self._observer)
        self._unanswered = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._network = network
        self._dials = DialBudget(network.knows)
        self._receipts = ReceiptIssuer(network, revision, quantization)
        self._stateless = StatelessRequests(model, self._validator, engine, store)
        self._memory = RequestAccount(model, self._limits, store, self._observer)
        self._notices: set[asyncio.Task[None]] = set()
        self._points = points if points is not None else PointsDesk(network.peer_id)
        sessions.ask_to_leave = self._ask_to_leave
        sessions.on_closed = self._points.charge
        self._streams: dict[str, set[ReplyStream]] = {}

    @property
    def closing(self) -> bool:
        """Whether new sessions, forwards, backwards and adapters are refused, and no session waits for cache."""
        return self._closing

    @closing.setter
    def closing(self, closing: bool) -> None:
        self._closing = closing
        if closing:
            self._sessions.refuse_waiting()

    async def idle(self) -> None:
        """Return once every request that has arrived is answered."""
        await self._all_answered.wait()

    async def hand_over(self) -> None:
        """Ask the clients of all sessions to use another server. Their sessions still work until `hang_up`."""
        notice = ServerClosing("this server is leaving; use another one")
        await asyncio.gather(*(_notify(client, notice) for client in self._sessions.clients()))

    def report(self) -> None:
        """Tell the observer what memory requests take."""
        self._memory.report()

    def _ask_to_leave(self, session: Session) -> None:
        """Tell a session's client that it is over."""
        if session.client is not None:
            notice = CacheReclaimed(
                "others need the session's attention cache; go on at another server, or open it here again later"
            )
            task = asyncio.get_running_loop().create_task(_notify(session.client, notice))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    def hang_up(self) -> None:
        """Accept nothing more and close all streams, so that nothing keeps the blocks in memory."""
        self.closing = self._steps.closed = True
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.close()
        self._sessions.clear()
        self._stateless.adapters.clear()

    async def __call__(self, raw: Stream) -> None:
        """Serve one stream until the peer closes it, violates the protocol, or does not read its replies."""
        stream = ReplyStream(raw)
        streams = self._streams.setdefault(stream.peer_id, set())
        streams.add(stream)
        state = _StreamState()
        admission: Admission | None = None
        try:
            if len(streams) > self._limits.streams:
                streams.discard(stream)  # it must not count while it is being refused
                await self._reject(stream, CacheFull(f"a peer may open {self._limits.streams} streams"))
                await stream.discard_incoming()
                return
            admission = self._memory.open_stream(stream, stream.peer_id, stream.interrupt)
            while not state.over:
                frame = await stream.receive(self._stateless.max_payload, admission.admit)
                admission.has_arrived()
                self._unanswered += 1
                self._all_answered.clear()
                try:
                    await self._handle_frame(stream, frame, admission.message, state)
                finally:
                    self._unanswered -= 1
                    if not self._unanswered:
                        self._all_answered.set()
                    admission.release()
        except ProtocolViolation as error:
            await self._reject(stream, error)
        except (MemoryFull, TooLong) as error:  # the payload was not read, so nothing after it can be
            if admission is None:
                await self._reject(stream, error)
                await stream.discard_incoming()
            else:
                admission.release()  # it was admitted if it came too slowly
                await self._reject(stream, error, admission.step)
                await stream.discard_incoming(REFUSED_PAYLOAD_TIMEOUT_S)
        finally:
            if admission is not None:
                admission.release()
                self._memory.close_stream(stream)
            streams.discard(stream)
            if not streams:
                self._streams.pop(stream.peer_id, None)
            if state.session is not None:
                self._sessions.detach(state.session, stream)

    async def _reject(self, stream: ReplyStream, error: RemoteError, step: int | None = None) -> None:
        """Say why the connection ends."""
        await stream.send(self._refuse(error, step))

    async def _answer_or_refuse(
        self, handling: Awaitable[Answer], message: messages.Message, client: str, step: int | None
    ) -> Answer:
        """The answer to a message, or a refusal. Raises `ProtocolViolation`, which ends the stream.

        Computing may raise anything. A fault of this server must not end the stream of the client, which learns only
        that it happened; the log says what it was.
        """
        try:
            return await handling
        except ProtocolViolation:
            raise
        except RemoteError as error:
            return self._refuse(error, step), b""
        except Exception as error:
            kind, peer = type(message).__name__, client[-6:]
            extra = {"request": kind, "peer": peer}
            logger.error("a %s of peer …%s failed", kind, peer, exc_info=error, extra=extra)
            fault = ServerFault("the computation failed at this server; its log says why")
            return self._refuse(fault, step), b""

    def _refuse(self, error: RemoteError, step: int | None) -> messages.Refusal:
        """The refusal that tells a client the error."""
        self._observer.request_refused(error.code)
        return messages.refusal(error, step)

    async def _send(
        self, stream: ReplyStream, reply: messages.Message, payload: Bytes, session: Session | None = None
    ) -> None:
        """Send an answer. The copy of outputs that were pushed waits until the push is under way.

        Args:
            session: that of the answer; None if it need not wait.
        """
        link = session.push_link if session is not None else None
        if isinstance(reply, messages.StepReply) and reply.pushed and link is not None:
            await stream.send_later(PUSHED_REPLY_DELAY_S, reply, payload)
        else:
            await stream.send(reply, payload)
        self._observer.payload_sent(len(payload))

    async def _handle_frame(
        self, stream: ReplyStream, frame: Frame, message: messages.ClientMessage, state: _StreamState
    ) -> None:
        self._observer.message_received(len(frame.payload))
        step = message.step if isinstance(message, messages.StepRequest | messages.ReceiptRequest) else None
        handling = self._handle_message(stream, message, frame.payload, state)
        reply, payload = await self._answer_or_refuse(handling, message, stream.peer_id, step)
        if reply is not None:
            try:
                await self._send(stream, reply, payload, state.session)
            except PeerTimeout:
                raise
            except PeerLost:  # a client that has hung up may have closed its session before
                pass

    async def _handle_message(
        self, stream: ReplyStream, message: messages.ClientMessage, payload: Bytes, state: _StreamState
    ) -> Answer:
        match message:
            case messages.StepRequest():
                return await self._steps.run_step(state.require_session(), message, payload, asked_by_client=True)
            case messages.PushRequest():
                await self._answer_pushed(stream.peer_id, message, payload)
                return None, b""
            case messages.ReplayRequest():
                return await self._steps.run_replay(state.require_session(), message, payload)
            case messages.ReceiptRequest() | messages.SignedTab():
                return await self._settle(state.require_session(), message), b""
            case messages.OpenSession():
                return await self._open_session(stream, message, state), b""
            case messages.SetNeighbors():
                self._set_neighbors(state.require_session(), message)
                return None, b""
            case messages.GiveUp():
                state.require_session().give_up(message.first, message.end)
                return None, b""
            case messages.CloseSession():
                if state.session is not None:
                    self._sessions.close(state.session, keep=message.keep)
                state.over = True
                return None, b""
            case messages.ForwardRequest():
                self._require_not_closing()
                return await self._stateless.run_forward(stream.peer_id, message, payload)
            case messages.BackwardRequest():
                self._require_not_closing()
                return await self._stateless.run_backward(stream.peer_id, message, payload)
            case messages.PutAdapters():
                self._require_not_closing()
                return await self._stateless.store_adapters(stream.peer_id, message, payload), b""
            case messages.InfoRequest():
                return self._info(), b""
            case messages.ProbeRequest():
                return self._probe(message, payload)

    async def _open_session(
        self, stream: ReplyStream, message: messages.OpenSession, state: _StreamState
    ) -> messages.Message:
        self._require_not_closing()
        if state.session is not None:
            raise ProtocolViolation("a stream carries one session; open another stream")
        span = self._validator.validate_span(message.revision, message.start, message.end)
        adapter = self._stateless.adapters.find(stream.peer_id, span, message.adapters)
        spender, weight = await self._points.admit(message.points, stream.peer_id)
        terms = SessionTerms(
            session_id=message.session_id,
            peer_id=stream.peer_id,
            span=span,
            max_length=message.max_length,
            reply_format=message.reply_format,
            adapters=message.adapters,
            wait_timeout_s=message.wait_timeout_s,
            early_exits=message.early_exits,
            spender=spender,
            weight=weight,
        )
        if self._sessions.tokens_reserved(terms) > self._sessions.quota:
            raise TooLong(
                f"a session of {message.max_length} tokens in blocks {span} is longer than what one peer may "
                f"have of this server's cache, {self._sessions.quota} tokens in all blocks; ask for a smaller "
                "max_length"
            )
        session = Session(terms, SessionCache(self._model.narrowed(span), adapter, message.max_length))
        await self._validator.load_formats(message.reply_format)
        try:
            state.session = await self._sessions.open_session(
                session, message.sequences, stream, message.prefix, self._copy_cache
            )
        except CacheFull:
            self._require_not_closing()  # if the server is leaving, say so instead
            raise
        return messages.SessionOpened(state.session.next_step, self._points.newest_tab(spender), state.session.begun)

    async def _copy_cache(self, into: SessionCache, source: SessionCache, length: int) -> None:
        await self._engine.compute_thread.run(into.begin_with, source, length)

    async def _settle(
        self, session: Session, message: messages.ReceiptRequest | messages.SignedTab
    ) -> messages.Message:
        if isinstance(message, messages.ReceiptRequest):
            return await self._receipts.issue(session, message.step)
        return messages.TabKept(await self._points.keep(session, message.tab))

    def _set_neighbors(self, session: Session, message: messages.SetNeighbors) -> None:
        """Who may push into the session, and where its outputs go. Raises `UnknownSession` if it is not open.

        A link that leads there already stays. There is no link if the client has named too many peers (see
        `DialBudget`): then it delivers the outputs itself.
        """
        self._sessions.require_open(session)  # nothing would ever close the link of a session that is forgotten
        session.allow_push_from(message.previous_peer, message.sequences)
        peer_id, session_id, client = message.next_peer, message.next_session_id, session.terms.peer_id
        if peer_id is None or session_id is None:
            session.close_push_link()
        elif session.push_link is None or not session.push_link.leads_to(peer_id, session_id):
            session.close_push_link()
            if (dial := self._dials.begin(client, peer_id, asyncio.get_running_loop().time())) is not None:
                session.push_link = PushLink(self._network, client, peer_id, session_id, dial)

    async def _answer_pushed(self, peer_id: str, message: messages.PushRequest, payload: Bytes) -> None:
        """Answer a step from the previous server. The reply or refusal goes to the session's client.

        The client does not hear of what only a malicious server does; such a step changes nothing. Raises
        `UnknownSession` if that server may not push there, or not so many sequences; `WrongPosition` if the step's
        number is beyond all that may come.
        """
        step = message.step
        session = await self._sessions.find_for_push(peer_id, message.client, message.session_id, len(step.counts))
        session.require_near(step.step)
        handling = self._steps.run_step(session, step, payload, asked_by_client=False)
        reply, output = await self._answer_or_refuse(handling, message, message.client, step.step)
        if reply is not None and session.client is not None:
            with suppress(PeerLost):  # a client that is away may ask again
                await self._send(session.client, reply, output, session)

    def _info(self) -> messages.InfoReply:
        span = self._model.span
        return messages.InfoReply(span.start, span.end, max(0, self._sessions.free), len(self._sessions), VERSION)

    def _probe(self, message: messages.ProbeRequest, payload: Bytes) -> tuple[messages.ProbeReply, bytes]:
        if len(payload) > messages.MAX_PROBE_BYTES:
            raise TooLong(f"a probe of {len(payload)} bytes; at most {messages.MAX_PROBE_BYTES} are answered")
        return messages.ProbeReply(), bytes(message.reply_bytes)

    def _require_not_closing(self) -> None:
        if self.closing:
            raise ServerClosing("this server is leaving; use another one")


async def _notify(client: ReplyStream, notice: RemoteError) -> None:
    with suppress(PeerLost, TimeoutError):
        async with asyncio.timeout(NOTICE_TIMEOUT_S):
            await client.send(messages.refusal(notice))


@dataclass
class _StreamState:
    """What one stream has agreed on so far."""

    session: Session | None = None
    over: bool = False

    def require_session(self) -> Session:
        """The stream's session. Raises `UnknownSession` if none was opened."""
        if self.session is None:
            raise UnknownSession("a session has to be opened on this stream first")
        return self.session
