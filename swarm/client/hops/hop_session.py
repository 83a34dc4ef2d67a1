"""One server's part of a session: what it was sent (history), how far it is (progress), and the stream to it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from swarm.client.config import RequestOptions
from swarm.client.hops.blame import Claim, InputClaims
from swarm.client.hops.hop_progress import NO_STEP, HopProgress, ReplyKind
from swarm.client.hops.hop_stream import CLOSE_TIMEOUT_S, HopStream
from swarm.client.hops.input_history import InputHistory, Step
from swarm.client.hops.settlement import Settlement
from swarm.client.hops.work_sample import SampleTaker
from swarm.client.points.wallet import Wallet
from swarm.client.routes.events import EventListener, ignore_events
from swarm.client.routes.route_source import RouteSource
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import (
    OutputShape,
    ReplyDeadline,
    describe_hop,
    initial_estimate,
    parse_reply,
    unexpected_reply,
    validate_left,
    validate_outputs,
)
from swarm.common.large_payloads import run_large
from swarm.data_structures import Hop, Span, StepLayout
from swarm.errors import (
    CacheReclaimed,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    ServerClosing,
    SuspectOutputs,
    TooLargeReply,
    remote_error,
)
from swarm.protocol import messages
from swarm.protocol.input_checksum import input_checksum
from swarm.transport.stream import Network
from swarm.trust.session_record import SessionRecord

logger = logging.getLogger(__name__)

CACHE_WAIT_S = 1.0
"""Seconds that a full server may let this client wait for space in its cache, before another server is asked."""

OPEN_TIMEOUT_S = 5.0
"""Seconds to connect and to open the session."""

_ReplayReply = asyncio.Future[tuple[messages.ServerMessage, bytes | memoryview]]


@dataclass(frozen=True)
class SessionContext:
    """The constants of one session.

    Attributes:
        network: this client's place in the network.
        routes: finds routes and hears which servers failed.
        options: what is asked of every server.
        span: the blocks.
        max_length: tokens that each sequence may have.
        adapter: what is added to the blocks.
        emit: receives the session's events.
        early_exits: whether servers may be asked to let tokens leave inside their spans, which is approximate.
        kept_receipts: where the receipts of servers that are left go, by session at the server; None if they are not
            asked for.
        samples: gets samples of the servers' work, when they have done it; None if none are taken.
        wallet: the points that the session spends; None for none.
    """

    network: Network
    routes: RouteSource
    options: RequestOptions
    span: Span
    max_length: int
    adapter: AdapterUpload = field(default_factory=AdapterUpload)
    emit: EventListener = ignore_events
    early_exits: bool = False
    kept_receipts: dict[bytes, messages.Receipt] | None = None
    samples: SampleTaker | None = None
    wallet: Wallet | None = None


class HopSession:
    """Blocks `hop.span` at one server.

    It turns calls into messages, and messages into events of `progress`. What is wrong with the server becomes
    `progress.error`; the chain decides what to do about that.

    Attributes:
        history: what went into these blocks so far.
        progress: which steps the server has and has answered.
        claims: what it says that it has computed, and was not compared yet (see `blame`).
        misled: what it has computed is not what this client knows, so its session has to begin again.
        record: what it has computed, as this client knows it; see `receipt`.
        filled_to: number of positions, in its longest sequence, that came in a replay: another server's work.
        begun: number of positions that the server had from an earlier session.

    Args:
        context: the constants of the session.
        hop: the server and its blocks.
        on_reply: called with the number and the validated outputs of each step that is answered.
        on_change: called after anything else has happened.
        history: what went into these blocks before; empty if None.
    """

    def __init__(
        self,
        context: SessionContext,
        hop: Hop,
        on_reply: Callable[[HopSession, int, PackedHidden], None],
        on_change: Callable[[], None],
        history: InputHistory | None = None,
    ) -> None:
        self.hop = hop
        self.session_id = secrets.token_bytes(16)
        self.history = history if history is not None else InputHistory()
        factor = context.routes.timeout_factor(hop.server.peer_id)
        self.progress = HopProgress(describe_hop(hop), initial_estimate(hop, factor, context.options.timeout))
        self.claims = InputClaims(on_change)
        self.misled = False
        self.record = SessionRecord()
        self.filled_to = self.begun = 0
        self._context = context
        self._on_reply = on_reply
        self._on_change = on_change
        self._stream = HopStream(context.network, hop, self._on_message, self._on_lost, self._max_reply_bytes)
        self._replay_reply: _ReplayReply | None = None
        self._replay_outputs: OutputShape | None = None
        self._unanswered_replays = 0  # also those that were interrupted, so that nothing waits for their answers
        self._neighbors = messages.SetNeighbors(None, None, None)
        self._opening_seconds = 0.0
        self._sending: asyncio.Task[None] | None = None
        self._settlement = Settlement(context, hop, self.session_id, self.record)
        self._farewell: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> str:
        return self.hop.server.peer_id

    @property
    def is_sound(self) -> bool:
        """Whether it has neither failed nor been misled."""
        return not self.misled and self.progress.error is None

    async def open(self, rows: int = 1, prefix: messages.PrefixOf | None = None, wait_s: float = CACHE_WAIT_S) -> int:
        """Connect and reserve cache space for some rows; the number that the server expects of the next step.

        The server waits up to `wait_s` seconds for space.

        With `prefix`, a new session begins with that, as far as the server has it; `begun` says how far.

        Called again, it continues the session at the server if that still knows it. Raises `PeerLost`, `PeerTimeout`,
        `ProtocolViolation`, or the `RemoteError` with which the server refuses.
        """
        options, adapter, wallet = self._context.options, self._context.adapter, self._context.wallet
        request = messages.OpenSession(
            session_id=self.session_id,
            revision=options.revision,
            start=self.hop.span.start,
            end=self.hop.span.end,
            max_length=self._context.max_length,
            reply_format=options.wire,
            wait_timeout_s=wait_s,
            adapters=adapter.adapter.digests(self.hop.span),
            early_exits=self._context.early_exits,
            sequences=rows,
            points=await wallet.points_for(self.peer_id, self._context.network.peer_id) if wallet is not None else None,
            prefix=prefix,
        )
        began = time.perf_counter()
        async with ReplyDeadline(self.hop, min(OPEN_TIMEOUT_S, options.timeout) + adapter.upload_timeout(self.hop)):
            stream = await self._stream.connect()
            frame = await adapter.request(stream, self.hop, request, b"", 0)
        reply = parse_reply(self.hop, frame)
        if not isinstance(reply, messages.SessionOpened):
            raise unexpected_reply(self.hop, reply)
        if prefix is not None:
            self.begun = min(reply.begun, prefix.length)
        if wallet is not None:
            wallet.note_tab(self.peer_id, reply.tab)
        self._opening_seconds = time.perf_counter() - began
        self.progress.on_opened()
        self._unanswered_replays = 0
        self._settlement.begin_again()
        if reply.next_step == 0:
            self.record.clear()
            if reply.begun < self.history.begins_at:
                self.progress.on_forgotten()
        self._stream.listen()
        return reply.next_step

    async def link(self, before: HopSession | None, after: HopSession | None, rows: int = 1) -> None:
        """Tell the server which one may push steps of `rows` rows to it, and which it pushes to (None: no server)."""
        self.progress.on_linked(pushes_onward=after is not None)
        self.claims.was_open = self.claims.was_open or before is not None
        self._neighbors = messages.SetNeighbors(
            previous_peer=before.peer_id if before is not None else None,
            next_peer=after.peer_id if after is not None else None,
            next_session_id=after.session_id if after is not None else None,
            sequences=rows,
        )
        await self._send(self._neighbors, b"", CLOSE_TIMEOUT_S)

    async def allow_rows(self, rows: int) -> None:
        """From now on pushed steps may have so many rows."""
        if self._neighbors.previous_peer is not None:
            self._neighbors = msgspec.structs.replace(self._neighbors, sequences=rows)
            await self._send(self._neighbors, b"", CLOSE_TIMEOUT_S)

    def expect(self, number: int, outputs: OutputShape) -> None:
        """A step is going to come to the server, from this client or from the server before."""
        self.progress.on_expected(number, outputs, time.perf_counter())

    def add_input(self, step: Step) -> None:
        """The input of a step has come to this client."""
        self.history.add(step)
        self.progress.on_input_received(step.number)

    def add_outputs(self, step: Step) -> None:
        """The outputs of a step, as the next hop's input, have come to this client."""
        claim = self.claims.open.get(step.number)
        if claim is not None and claim.checksum is not None:
            self.record.add_step(claim.checksum, step.checksum)
            step.checksum.compute_later()

    def give_up(self, after: int, copied_rows: bool) -> None:
        """Forget the steps behind number `after`."""
        self.history.drop_after(after)
        self.claims.forget_after(after)
        self.record.drop_after(after)
        self.progress.on_given_up(after, copied_rows)

    def mislead(self, number: int, keeps_inputs: bool = False) -> None:
        """From step `number` on nothing counts, so the session begins again. `keeps_inputs` if its inputs are right."""
        self.misled = True
        self.claims.forget_after(number - 1)
        if not keeps_inputs:
            self.history.forget_from(number)
        self.progress.on_misled(number, self.history.last)
        self._fail_waiting(SuspectOutputs(f"{describe_hop(self.hop)} has to begin again"))

    @property
    def refill_seconds(self) -> float:
        """About how long it takes until another server has what this one has."""
        return self._opening_seconds + self.progress.clock.timeouts.refill_seconds(self.history.tokens)

    async def announce_given_up(self, first: int, end: int) -> None:
        """Tell the server that the steps from number `first` up to, but without, `end` need not be computed."""
        await self._send(messages.GiveUp(first, end), b"", CLOSE_TIMEOUT_S)

    async def deliver(self, step: Step) -> None:
        """Hand the server a step, which it reads when it has computed those before; its answer comes to `on_reply`."""
        self.progress.on_delivered(step.number, step.outputs, time.perf_counter())
        await self._send(step.request, step.hidden.payload, self.progress.send_timeout(step.number))

    def begin_delivery(self, step: Step) -> asyncio.Task[None]:
        """`deliver` in the background, because a server that hangs may not read a large step."""
        self._sending = asyncio.get_running_loop().create_task(self.deliver(step))
        return self._sending

    async def replay(
        self, layout: StepLayout, hidden: PackedHidden, next_step: int, want_outputs: bool, epoch: int = 0
    ) -> PackedHidden | None:
        """Fill the cache with past inputs; their outputs, if wanted. The next step may continue `epoch`.

        Raises `PeerLost`, `PeerTimeout`, `ProtocolViolation`, or the `RemoteError` with which the server refuses.
        """
        request = messages.ReplayRequest(
            next_step=next_step,
            starts=list(layout.starts),
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            offsets=list(layout.offsets) if layout.offsets is not None else None,
            return_outputs=want_outputs,
            epoch=epoch,
            rope_lengths=list(layout.rope_lengths) if layout.rope_lengths is not None else None,
        )
        self._replay_reply = asyncio.get_running_loop().create_future()
        self.progress.on_replay_begun()
        outputs = OutputShape(hidden.tokens, hidden.hidden_size)
        self._replay_outputs = outputs if want_outputs else None
        timeout = self.progress.clock.timeouts.timeout(hidden.tokens)
        self._unanswered_replays += 1
        try:
            await self._send(request, hidden.payload, timeout)
            async with asyncio.timeout(timeout):
                reply, payload = await self._replay_reply
        except TimeoutError:
            raise PeerTimeout(f"{describe_hop(self.hop)} did not answer within {timeout:.1f} s") from None
        finally:
            self._replay_reply = self._replay_outputs = None
        if not isinstance(reply, messages.ReplayReply):
            raise unexpected_reply(self.hop, reply)
        # Only this client can replay.
        if reply.input_checksum != await run_large(len(hidden.payload), input_checksum, request, hidden.payload):
            raise ProtocolViolation(f"{describe_hop(self.hop)} says that it was sent something else to replay")
        self.filled_to = max(self.filled_to if any(layout.starts) else 0, *layout.lengths)
        self.record.add_replay(request, reply.input_checksum, payload if want_outputs else None)
        return (
            await run_large(len(payload), validate_outputs, self.hop, outputs, payload, reply) if want_outputs else None
        )

    async def receipt(self) -> messages.Receipt | None:
        """The server's receipt of all that it has answered and that stands; None if that is nothing.

        Raises `PeerLost`, `PeerTimeout`, the `RemoteError` with which the server refuses, or `ProtocolViolation` if the
        receipt does not say what this client knows.
        """
        return await self._settlement.receipt(self._send)

    async def close(self, keep: int = 0) -> None:
        """Free the session at the server, if it can still be told. Before, get its receipt and sign for it, if that is
        to be done.

        Args:
            keep: positions that the server may keep.
        """
        error = self.progress.error
        if error is None or isinstance(error, ServerClosing | CacheReclaimed):
            await self._settlement.settle(self._send)
        self.claims.forget_after(NO_STEP)
        self.progress.on_closed()
        if self._sending:
            self._sending.cancel()
            self._sending = None
        may_answer = self.progress.may_be_answered or not self._stream.is_listening
        await self._stream.close(may_answer and self.progress.error is None, keep)

    def hang_up(self) -> None:
        """End the connection without a word."""
        if self._farewell:
            self._farewell.cancel()
        self._stream.hang_up()

    async def _send(self, message: messages.Message, payload: bytes | memoryview, seconds: float) -> None:
        """Send a message. A server that does not read is as bad as one that does not answer."""
        try:
            await self._stream.send(message, payload, seconds)
        except (PeerLost, PeerTimeout) as error:
            self._on_lost(error)

    def _max_reply_bytes(self) -> int:
        """As many as the largest answer that may come now, at four bytes a value."""
        replay = self._replay_outputs.values if self._replay_outputs is not None else 0
        return 4 * max(self.progress.largest_reply, replay)

    def _on_message(self, reply: messages.ServerMessage, payload: bytes | memoryview) -> None:
        answered = False
        match reply:
            case messages.StepReply():
                answered = self._on_step_reply(reply, payload)
            case messages.Refusal():
                self._on_refusal(reply)
            case messages.Receipt() | messages.TabKept() if self._settlement.on_reply(reply):
                pass
            case messages.ReplayReply() if self._unanswered_replays:
                if (answer := self._oldest_replay()) is not None:
                    answer.set_result((reply, payload))
            case _ if self._replay_reply is not None and not self._replay_reply.done():
                self._replay_reply.set_result((reply, payload))
            case _:
                raise unexpected_reply(self.hop, reply)
        if self.progress.error is not None:
            self._fail_waiting(self.progress.error)
        if not answered:
            self._on_change()

    def _on_step_reply(self, reply: messages.StepReply, payload: bytes | memoryview) -> bool:
        """Whether it was the awaited answer to a step, so that the chain has heard of it."""
        kind = self.progress.classify_reply(reply.step)
        if not self.is_sound or kind is ReplyKind.OUTDATED:  # what a failed hop answers is not passed on
            return False
        if kind is ReplyKind.UNKNOWN:
            self._doubt(unexpected_reply(self.hop, reply))
            return False
        shape = self.progress.outputs(reply.step)
        try:
            left = validate_left(self.hop, self._context.span.start, shape.exits, reply.left)
            outputs = validate_outputs(self.hop, shape, payload, reply)
        except ProtocolViolation as error:
            if not self.claims.was_open and not isinstance(error, NotFiniteOutputs):
                raise
            # Perhaps it is what the server before has pushed that does not allow for better.
            self.claims.add(reply.step, Claim(reply.input_checksum, error))
            return False
        if left is not None:
            outputs = replace(outputs, left=left)
        now, is_full = time.perf_counter(), not any(left or ())
        if not self.progress.on_reply(reply.step, reply.compute_ms / 1e3, reply.pushed, now, is_full, reply.sessions):
            return False
        self.claims.add(reply.step, Claim(reply.input_checksum))
        self._on_reply(self, reply.step, outputs)
        return True

    def _doubt(self, error: ProtocolViolation) -> None:
        """An answer to no step of this client's. Raises the error if no other server may have sent one."""
        if not self.claims.was_open:
            raise error
        self.claims.add(self.progress.replied + 1, Claim(None, error))

    def _on_refusal(self, refusal: messages.Refusal) -> None:
        if self.misled:
            return
        error = remote_error(refusal.code, f"{describe_hop(self.hop)} refused: {refusal.message}")
        if self._unanswered_replays and refusal.step is None:
            if (answer := self._oldest_replay()) is not None:
                answer.set_exception(error)
            return
        if self._settlement.on_refused(error, refusal.step):
            return
        self.progress.on_refused(error, refusal.step)
        if self.progress.leaving is not None and self._farewell is None:
            # It may be gone when the next step comes.
            self._farewell = asyncio.get_running_loop().create_task(self._settlement.settle(self._send))

    def _oldest_replay(self) -> _ReplayReply | None:
        """What waits for the answer to the oldest replay, which has come: only the newest does, and others were
        interrupted."""
        self._unanswered_replays -= 1
        waiting = self._replay_reply if not self._unanswered_replays else None
        return waiting if waiting is not None and not waiting.done() else None

    def _on_lost(self, error: Exception) -> None:
        if isinstance(error, TooLargeReply) and self.claims.was_open:
            self._doubt(error)
        elif not self.misled:
            self.progress.on_failed(error)
        self._fail_waiting(error)
        self._on_change()

    def _fail_waiting(self, error: Exception) -> None:
        if self._replay_reply is not None and not self._replay_reply.done():
            self._replay_reply.set_exception(error)
        self._settlement.fail(error)
