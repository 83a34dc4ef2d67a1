"""One server's part of a session: its stream, what it was handed, what it has answered.

A task listens to the stream all the time, because answers come to steps that this client never sent: the server before
may have pushed them. What it hears is checked here and handed to the chain; what is wrong becomes `error`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarm.client.chain.input_history import Record, Step
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import (
    OutputShape,
    describe_hop,
    initial_estimate,
    parse_reply,
    reply_deadline,
    unexpected_reply,
    validate_outputs,
)
from swarm.client.wire.request_options import RequestOptions
from swarm.data_structures import Hop, HopTiming, StepLayout
from swarm.errors import (
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    RequestRefused,
    ServerClosing,
    WrongPosition,
    remote_error,
)
from swarm.protocol import messages
from swarm.transport.stream import Network, Stream

CLOSE_TIMEOUT = 1.0
"""Seconds that a server gets to read that a session is over."""

ROOM_PATIENCE = 1.0
"""Seconds that a full server may let us wait for room, before we look elsewhere."""

OPEN_TIMEOUT = 5.0
"""Seconds to connect and to be let in."""

PARDONS = 3
"""How often a server may lose its memory, its connection or an answer before it has answered anything new."""

_Answer = asyncio.Future[tuple[messages.ServerMessage, bytes | memoryview]]

NOTHING_YET = -1
"""In place of a step's number."""


class HopSession:
    """Blocks `hop.span` at one server.

    Attributes:
        record: what went into these blocks so far.
        replied: number of the last step that it answered; it has answered all before.
        passed_on: whether it handed that step's outputs to the server behind it, as it says.
        may_push: whether it is meant to; it may not know yet that it is not.
        asked: number of the last step that this client handed to it.
        pushed: number of the last step that the server before says it has handed to it, none left out.
        rejected: number of the last step that it refused as it was pushed.
        owes: number of the last step that had been begun when its cache was filled with what came before.
        distrusts_pushes: it refused a pushed step.
        due: time (of `time.perf_counter`) by which the answer that is awaited should have come.
        error: why it cannot go on.
        leaving: its word that it is going to leave; it still answers what it was handed.
        stale: its cache may hold a step that was given up, or too little, and has to be filled anew.
        abandoned: it has been reported and left; only its record is of use.
        pardons: how often the server was given another chance since it answered something new.
        call_start: number of the first of the steps that were begun together with the current one.
        timing: of these steps.

    Args:
        heard: called with the number and the checked outputs of each step that is answered.
        changed: called after anything has happened.
        slowness: how many times longer than it announces the server is given, because it was too slow before.
        adapter: what is added to the blocks.
    """

    def __init__(
        self,
        network: Network,
        hop: Hop,
        manner: RequestOptions,
        max_length: int,
        heard: Callable[[HopSession, int, PackedHidden], None],
        changed: Callable[[], None],
        slowness: float = 1.0,
        adapter: AdapterUpload | None = None,
    ) -> None:
        self.hop = hop
        self.session_id = secrets.token_bytes(16)
        self.record = Record()
        self.replied = self.asked = self.pushed = self.rejected = self.owes = NOTHING_YET
        self.passed_on = self.may_push = False
        self.due = float("inf")
        self.error: Exception | None = None
        self.leaving: ServerClosing | None = None
        self.stale = False
        self.abandoned = False
        self.distrusts_pushes = False
        self.pardons = 0
        self.timing: HopTiming | None = None
        self.call_start = 0
        self._network = network
        self._manner = manner
        self._max_length = max_length
        self._adapter = adapter or AdapterUpload()
        self._heard = heard
        self._changed = changed
        self._stream: Stream | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answer: _Answer | None = None
        self._expected: dict[int, OutputShape] = {}
        self._void: set[int] = set()
        self._furthest = NOTHING_YET
        """Number of the newest step that it ever answered; `replied` goes back where a replay begins earlier."""
        self._pushes: set[int] = set()
        """Steps that were pushed to it, whatever has become of that: one that is refused may be one of those."""
        self._replaying: OutputShape | None = None
        self._unheard = 0
        """Replays whose answers have not come, also those that nobody waits for any more."""
        self._handed_at = 0.0
        self._clocked = NOTHING_YET
        """Number of the step of which that is known."""
        self._patience = initial_estimate(hop, slowness, manner.timeout)

    @property
    def peer_id(self) -> str:
        return self.hop.server.peer_id

    @property
    def received(self) -> int:
        """Number of the last step whose input has come to this client."""
        return self.record.last

    async def open(self) -> int:
        """Connect and reserve room; the number that the server expects of the next step.

        Called again, it continues the session at the server if that still knows it. Raises `RemoteError` of the fitting
        kind.
        """
        self.hang_up()
        patience = min(OPEN_TIMEOUT, self._manner.timeout)
        request = messages.OpenSession(
            session_id=self.session_id,
            revision=self._manner.revision,
            start=self.hop.span.start,
            end=self.hop.span.end,
            max_length=self._max_length,
            reply_format=self._manner.wire,
            wait_timeout_s=ROOM_PATIENCE,
            adapters=self._adapter.adapter.digests(self.hop.span),
        )
        async with reply_deadline(self.hop, patience + self._adapter.seconds(self.hop)):
            self._stream = await self._network.open_stream(self.peer_id)
            frame = await self._adapter.ask(self._stream, self.hop, request, b"", 0)
        reply = parse_reply(self.hop, frame)
        if not isinstance(reply, messages.SessionOpened):
            raise unexpected_reply(self.hop, reply)
        self.error = None
        self.asked = self.pushed = self.replied
        self._unheard = 0
        self._listener = asyncio.get_running_loop().create_task(self._listen(self._stream))
        return reply.next_step

    async def link(self, before: HopSession | None, after: HopSession | None) -> None:
        """Tell the server who may push to it and to whom it may push; None is this client."""
        self.may_push = after is not None
        await self._send(
            messages.SetNeighbors(
                previous_peer=before.peer_id if before is not None else None,
                next_peer=after.peer_id if after is not None else None,
                next_session_id=after.session_id if after is not None else None,
            ),
            b"",
            CLOSE_TIMEOUT,
        )

    async def deliver(self, step: Step) -> None:
        """Hand the server a step. Its answer comes through `heard`. Trouble becomes `error`.

        It reads the step when it has computed those before: that is waited for here.
        """
        self.asked = step.number
        self._expected.setdefault(step.number, OutputShape(step.hidden.tokens, step.hidden.hidden_size))
        self._start_clock(step.number)
        request = messages.StepRequest(
            step=step.number,
            starts=list(step.layout.starts),
            counts=list(step.layout.counts),
            format=step.hidden.wire,
            dtype=step.hidden.dtype,
            sources=_list(step.layout.sources),
            offsets=_list(step.layout.offsets),
        )
        before = sum(self._expected[number].tokens for number in self._awaited() if number < step.number)
        await self._send(request, step.hidden.payload, self._patience.allowed(before + step.hidden.tokens))

    def expect(self, number: int, outputs: OutputShape) -> None:
        """A step is going to come to the server, from whomever."""
        self._expected[number] = outputs
        self._handed_at = time.perf_counter()

    def is_handed(self, number: int) -> bool:
        """Whether the server has the step, or it is on its way there, from whomever."""
        return number <= max(self.replied, self.asked, self.pushed)

    def was_pushed(self, number: int, reliable: bool) -> None:
        """The server before says that it has handed the step on. Only where that is `reliable` it is waited for."""
        if number <= self.replied or number <= self.rejected:
            return
        self._pushes.add(number)
        if reliable:
            self.pushed = max(self.pushed, number)
            self._start_clock(number)

    def can_answer(self, next_step: int) -> bool:
        """Whether a server that expects step `next_step` next can still tell all that it has not answered."""
        computed = [number for number in self._awaited() if number < next_step]
        return next_step > self.replied and len(computed) <= 1

    def filled(self, done: int) -> None:
        """The server is where it was after step `done`; what came later has to be handed to it again."""
        self.stale = False
        self.replied = self.asked = self.pushed = done
        self.due = float("inf")

    def give_up(self, number: int) -> None:
        """No answer to this step is wanted any more, though one may still come."""
        self._void.add(number)
        self.record.drop(number)

    async def replay(
        self, layout: StepLayout, hidden: PackedHidden, next_step: int, want_outputs: bool
    ) -> PackedHidden | None:
        """Fill the cache with past inputs; their outputs, if wanted. Raises `RemoteError` of the fitting kind."""
        request = messages.ReplayRequest(
            next_step=next_step,
            starts=list(layout.starts),
            counts=list(layout.counts),
            format=hidden.wire,
            dtype=hidden.dtype,
            offsets=_list(layout.offsets),
            return_outputs=want_outputs,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self.asked = self.pushed = self.replied  # what is under way may still be refused, and counts no more
        outputs = OutputShape(hidden.tokens, hidden.hidden_size)
        self._replaying = outputs if want_outputs else None
        patience = self._patience.allowed(hidden.tokens)
        self._unheard += 1
        try:
            await self._send(request, hidden.payload, patience)
            async with asyncio.timeout(patience):
                reply, payload = await self._answer
        except TimeoutError:
            raise PeerTimeout(f"{describe_hop(self.hop)} did not answer within {patience:.1f} s") from None
        finally:
            self._answer = self._replaying = None
        if not isinstance(reply, messages.ReplayReply):
            raise unexpected_reply(self.hop, reply)
        return validate_outputs(self.hop, outputs, payload, reply) if want_outputs else None

    async def close(self) -> None:
        """Free the session at the server, if it can still be told."""
        try:
            if self._stream is not None:
                with suppress(RemoteError, TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await self._stream.send(messages.CloseSession())
                        await self._heard_out(self._stream)
        finally:
            self.hang_up()

    async def _heard_out(self, stream: Stream) -> None:
        """Wait until a server that is still going to answer has ended the stream.

        Its answer to somebody who has hung up would fail, and with it the stream, on which the farewell waits unread.
        """
        if self.error is not None:
            return
        if self._listener is None:  # the answer to the opening
            while True:
                await stream.receive(0)
        if any(number > self.replied for number in self._expected):
            await asyncio.wait({self._listener})

    def hang_up(self) -> None:
        """End the connection without a word."""
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _send(self, message: messages.Message, payload: bytes | memoryview, patience: float) -> None:
        """Send, and note if that fails. A server that does not read is as bad as one that does not answer."""
        if self._stream is None:
            self._fail(PeerLost(f"{describe_hop(self.hop)} is not connected"))
            return
        try:
            async with asyncio.timeout(patience):
                await self._stream.send(message, payload)
        except TimeoutError:
            self._fail(PeerTimeout(f"{describe_hop(self.hop)} has read nothing for {patience:.1f} s"))
        except PeerLost as error:
            self._fail(PeerLost(f"{describe_hop(self.hop)} is gone: {error}"))

    async def _listen(self, stream: Stream) -> None:
        try:
            while True:
                frame = await stream.receive(self._largest)
                self._hear(messages.decode_server(frame.header), frame.payload)
                self._changed()
        except PeerLost as error:
            self._fail(PeerLost(f"{describe_hop(self.hop)} is gone: {error}"))
        except Exception as error:  # what the server did wrong, or a mistake of ours: either way this hop is over
            self._fail(error)

    def _largest(self) -> int:
        """Bytes that an answer may have now: as many as the largest one that is due."""
        due = [*self._expected.values(), *([self._replaying] if self._replaying is not None else [])]
        return max((4 * outputs.values for outputs in due), default=0)

    def _hear(self, reply: messages.ServerMessage, payload: bytes | memoryview) -> None:
        match reply:
            case messages.StepReply():
                self._hear_step(reply, payload)
            case messages.Refusal():
                if reply.step is None or not self._is_past(reply.step):
                    error = remote_error(reply.code, f"{describe_hop(self.hop)} refused: {reply.message}")
                    self._refused(error, reply.step)
            case messages.ReplayReply() if self._unheard:
                self._replay_answered(lambda answer: answer.set_result((reply, payload)))
            case _ if self._answer is not None and not self._answer.done():
                self._answer.set_result((reply, payload))
            case _:
                raise unexpected_reply(self.hop, reply)

    def _hear_step(self, reply: messages.StepReply, payload: bytes | memoryview) -> None:
        if self._is_past(reply.step):
            return
        due = self._expected.get(reply.step)
        if due is None:
            if reply.step <= self._furthest:
                return  # given up long ago
            raise unexpected_reply(self.hop, reply)
        outputs = validate_outputs(self.hop, due, payload, reply)
        if reply.step > min(self._awaited()):
            self._missed(reply.step)
            return
        compute = reply.compute_ms / 1e3
        if self._clocked == reply.step:
            seconds = time.perf_counter() - self._handed_at
            self._patience.answered(seconds, due.tokens)
        else:  # the answer has overtaken the word of the server before that it has pushed the step
            seconds = compute
        self._time(reply.step, HopTiming(seconds, compute))
        self.replied, self.passed_on = reply.step, reply.pushed
        if reply.step > self._furthest:
            self._furthest, self.pardons = reply.step, 0
        # Those of the newest call stay: what was asked for twice may come twice.
        oldest = min(reply.step, self.call_start)
        self._expected = {number: outputs for number, outputs in self._expected.items() if number >= oldest}
        self._void = {number for number in self._void if number > reply.step}
        self._pushes = {number for number in self._pushes if number > reply.step}
        self.due = float("inf")
        self._handed_at = time.perf_counter()
        for number in self._awaited()[:1]:
            self._start_clock(number)
        self._heard(self, reply.step, outputs)

    def _missed(self, step: int) -> None:
        """An answer before that to `step` was lost, and the server remembers only the newest: it has to begin again."""
        if self.pardons < PARDONS:
            self.stale = True
        else:
            self._fail(ProtocolViolation(f"{describe_hop(self.hop)} answers step {step}, but never the one before"))

    def _refused(self, error: RemoteError, step: int | None) -> None:
        if self._unheard and step is None:
            self._replay_answered(lambda answer: answer.set_exception(error))
        elif isinstance(error, ServerClosing) and step is None:
            self.leaving = error
        elif isinstance(error, RequestRefused) and not self._is_asked(step, error):
            # What was pushed to it was not right (perhaps before we heard of the push), or it has missed a step before.
            # The server before may be to blame: our copy will show.
            first = min(self._awaited(), default=self.rejected)
            self._pushes.discard(step if step is not None else first)
            self.distrusts_pushes = True
            self.pushed = min(self.pushed, self.asked)
            self.rejected = max(self.rejected, first if step is None else step)
        else:
            self._fail(error)

    def _replay_answered(self, settle: Callable[[_Answer], None]) -> None:
        """The answer to the oldest replay has come. Only the newest is waited for; the others were interrupted."""
        self._unheard -= 1
        if not self._unheard and self._answer is not None and not self._answer.done():
            settle(self._answer)

    def _is_past(self, number: int) -> bool:
        """Whether the step was answered (it was asked for twice) or given up."""
        return number <= self.replied or number in self._void

    def _is_asked(self, step: int | None, error: RemoteError) -> bool:
        """Whether a refusal of a step (None: of any) means what this client has handed over, not the server before.

        Where both have, and the server had missed a step before, the first refusal is that of the push.
        """
        if step is None:
            return self.asked >= self.pushed and self.asked > self.replied and self.asked not in self._void
        return step <= self.asked and not (isinstance(error, WrongPosition) and step in self._pushes)

    def _awaited(self) -> list[int]:
        """Steps that the server still has to answer, ascending."""
        return sorted(number for number in self._expected if not self._is_past(number))

    def _start_clock(self, number: int) -> None:
        """The step is on its way to the server, or next there: an answer is due in the time of all that are under way.

        That runs from when the first of them came to be the first.
        """
        under_way = [number for number in self._awaited() if self.is_handed(number)]
        if not under_way:
            return
        if number == under_way[0]:
            self._handed_at, self._clocked = time.perf_counter(), number
        self.due = self._handed_at + self._patience.allowed(sum(self._expected[n].tokens for n in under_way))

    def _time(self, number: int, timing: HopTiming) -> None:
        """Add up what the steps of one call took."""
        if self.timing is not None and number > self.call_start:
            timing = HopTiming(self.timing.total + timing.total, self.timing.compute + timing.compute)
        self.timing = timing

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._changed()


def _list(values: Sequence[int] | None) -> list[int] | None:
    return list(values) if values is not None else None
