"""How far one server of a chain is with the steps of a session. Pure: named events in, decisions out.

Theory of operation. Every step has a number; numbers only grow, and a step that was given up leaves a gap. A step is in
one of these states at a server:

    event                EXPECTED     HANDED                     ANSWERED    VOID
    delivered            HANDED       -                          -           -
    pushed               HANDED       -                          -           -
    replied              ANSWERED     ANSWERED                   -           -
    refused (as pushed)  EXPECTED     EXPECTED: the client       -           -
                                      delivers its own copy
    pushes stopped       -            EXPECTED if it was         -           -
                                      pushed
    refused (as sent)    the hop has FAILED
    given up             VOID         VOID                       -           -
    refilled up to n     EXPECTED if the number is above n, else ANSWERED    -

Cursors say all that: every step up to `replied` is ANSWERED, and one up to `delivered` (handed over by this client) or
`pushed` (handed over by the server before) is HANDED. `received` is the last step whose input this client knows, so
that it could deliver it. VOID steps are remembered until a later step is answered; a reply to one is ignored.

The hop itself is in one of these states:

    WORKING --an answer was lost, a void step copied rows--> STALE --refilled--> WORKING
    WORKING, STALE --connection lost, timeout, refusal, bad reply--> FAILED
    FAILED --repaired (reconnected or refilled)--> WORKING          at most MAX_RETRIES times without a new answer
    FAILED --replaced--> REPLACED                                   only its history is of use now
    WORKING --leaving--> WORKING until no step is under way, then FAILED

To give up all steps after number n and to go on with another step n + 1 is an ordinary transition, also between a
failure and its repair: `on_given_up(n)` makes the later steps VOID, a refill covers only what remains, and the new step
gets a new number. Nothing but the events of these classes changes their attributes.
"""

from __future__ import annotations

import enum

from swarm.client.wire.reply_checks import OutputShape
from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.common.kept_errors import without_frames
from swarm.data_structures import HopTiming
from swarm.errors import (
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    RequestRefused,
    ServerClosing,
    UnknownSession,
    WrongPosition,
)

NO_STEP = -1
"""Stands for a step's number where there is no step."""

NO_DEADLINE = float("inf")

MAX_RETRIES = 3
"""Repairs of one server that are tried before it has answered something new."""


class ReplyKind(enum.Enum):
    """What the reply to a step is, judged by the step's number."""

    EXPECTED = "expected"
    OUTDATED = "outdated"
    """The step was answered before or given up: the reply is ignored."""
    UNKNOWN = "unknown"
    """The server was never to get such a step."""


class HopClock:
    """When the awaited answers of one server are due, and how long its answers took.

    The steps under way share one deadline, which runs from when the first of them became the server's next one.

    Attributes:
        deadline: when the next answer should have come; infinite if none is awaited.
        late_from: when the next answer begins to be later than usual; infinite if none is awaited.
        timing: what the steps of the newest call took together; None before the first answer.
        slowness: how many times longer than usual the last answer took whose start is known.
        measured: how many answers have told how long the server takes.
        timeouts: learns from the answers how long they may take.
    """

    def __init__(self, timeouts: TimeoutEstimator) -> None:
        self.deadline = self.late_from = NO_DEADLINE
        self.timing: HopTiming | None = None
        self.slowness = 1.0
        self.measured = 0
        self._newest: tuple[float, int] | None = None
        self.timeouts = timeouts
        self._start = 0.0
        self._timed_step: int | None = None
        """The step that is known to have become the server's next one at `_start`."""

    def late_at(self, slowness: float) -> float:
        """`late_from`, if answers take `slowness` times longer than usual just now."""
        return self._start + slowness * (self.late_from - self._start)

    def waited(self, now: float) -> float:
        """Seconds since the first step under way became the server's next one."""
        return now - self._start

    def excuse(self, seconds: float) -> None:
        """This client itself stood still for so long: that is not the server's time."""
        self._start += seconds
        self.late_from += seconds
        self.deadline += seconds

    def on_expected(self, now: float) -> None:
        """A step is going to come to the server, which has nothing else to do."""
        self._start = now

    def on_handed(self, number: int, first: int, tokens: int, now: float, first_tokens: int | None = None) -> None:
        """Step `number` is on its way to the server, where `first` is the next one.

        Args:
            tokens: of all steps under way.
            first_tokens: of the next one; None if that is the only one.
        """
        if number == first:
            self._start, self._timed_step = now, number
        self.deadline = self._start + self.timeouts.timeout(tokens)
        self.late_from = self._start + self.timeouts.late_after(first_tokens if first_tokens is not None else tokens)

    def on_reply(
        self,
        number: int,
        tokens: int,
        compute_seconds: float,
        continues: bool,
        now: float,
        full: bool = True,
        sessions: int = 1,
    ) -> None:
        """The server has answered a step of so many tokens, which `continues` the call of the step before.

        Args:
            full: the tokens have passed all blocks. Others take less time, which says nothing about these.
            sessions: for how many the server computes.
        """
        seconds = compute_seconds  # if the answer overtakes the notice of a push, the step's start is not known
        if self._timed_step == number:
            seconds = now - self._start
            if full:
                self.slowness = self.timeouts.observe(seconds, tokens)
                self.measured += 1
                self._newest = seconds, tokens
        if self.timing is not None and continues:
            seconds, compute_seconds = self.timing.total + seconds, self.timing.compute + compute_seconds
        self.timing = HopTiming(seconds, compute_seconds, sessions)
        self.deadline = self.late_from = NO_DEADLINE
        self._start = now

    def take_measured(self) -> tuple[float, int] | None:
        """Seconds and tokens of the newest measured answer; None if there was none since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Nothing is under way."""
        self.deadline = self.late_from = NO_DEADLINE


class HopProgress:
    """Cursors and flags of one hop, changed by events only. Times are seconds on the clock of the caller.

    Attributes:
        replied: number of the last step that the server answered; it has answered all before.
        delivered: number of the last step that this client handed to it.
        pushed: number of the last step that the server before says it has handed to it, none left out.
        rejected: number of the last step that it refused as it was pushed.
        received: number of the last step whose input has come to this client.
        catch_up_to: number of the last step that had begun when the hop took its place. Those that were given up before
            may still be pushed to it.
        error: why the hop cannot go on.
        leaving: the server's announcement that it is going to leave; it still answers what it was handed.
        stale: the cache may hold a step that was given up, or too little, and has to be refilled.
        replaced: the hop was left.
        asked: number of the last step for which another server was asked, or could not be asked.
        retries: repairs since the server answered something new.
        push_refused: it refused a pushed step, and this client has not yet dealt with that.
        pushes_onward: it was told to push to the server behind. It may not know yet that it is not to any more.
        last_was_pushed: whether it handed the outputs of its last answered step to the server behind, as it says.
        clock: when the awaited answers are due, and how long the answers took.

    Args:
        server: the server, for error messages.
        timeouts: how long its answers may take.
    """

    def __init__(self, server: str, timeouts: TimeoutEstimator) -> None:
        self.replied = self.delivered = self.pushed = self.rejected = self.received = NO_STEP
        self.catch_up_to = self.asked = NO_STEP
        self.clock = HopClock(timeouts)
        self.error: Exception | None = None
        self.leaving: ServerClosing | None = None
        self.stale = self.replaced = False
        self.retries = 0
        self.push_refused = self.pushes_onward = self.last_was_pushed = False
        self._server = server
        self._expected: dict[int, OutputShape] = {}
        """The steps that the server still has to answer, ascending, with what each answer has to hold."""
        self._void: dict[int, int] = {}
        """Steps that were given up and may be answered all the same, with the number of values of the answer."""
        self._newest = NO_STEP
        """The newest step that was ever answered; `replied` goes back where a refill begins earlier."""
        self._seen_pushes: set[int] = set()
        """Steps that were pushed, whatever became of that: a step that is refused may be one of those."""
        self._first_of_call = 0
        self._largest = self._largest_before = 0
        """Values of the largest answers of this call and of the one before: an answer may come twice, and late."""

    # What others ask

    @property
    def deadline(self) -> float:
        """When the next awaited answer should have come; infinite if none is awaited."""
        return self.clock.deadline

    @property
    def expected(self) -> list[int]:
        """Numbers of the steps that the server still has to answer, ascending."""
        return list(self._expected)

    def outputs(self, number: int) -> OutputShape:
        """What the answer to an expected step has to hold."""
        return self._expected[number]

    @property
    def largest_reply(self) -> int:
        """Values in the largest answer that may come now."""
        return max(self._largest, self._largest_before, *self._void.values())

    @property
    def may_be_answered(self) -> bool:
        """Whether the server may still answer something, wanted or not."""
        return bool(self._expected or self._void)

    def classify_reply(self, number: int) -> ReplyKind:
        """What a reply to step `number` is."""
        if number in self._expected:
            return ReplyKind.EXPECTED
        is_past = number <= max(self.replied, self._newest, self.catch_up_to) or number in self._void
        return ReplyKind.OUTDATED if is_past else ReplyKind.UNKNOWN

    def is_handed(self, number: int) -> bool:
        """Whether the server has the step, or the step is on its way there."""
        return number <= self.replied or number <= self.delivered or number <= self.pushed

    def send_timeout(self, number: int) -> float:
        """Seconds that the server gets to read step `number`: it computes those before it first."""
        tokens = 0
        for earlier, outputs in self._expected.items():
            if earlier <= number:
                tokens += outputs.tokens
        return self.clock.timeouts.timeout(tokens)

    def can_answer(self, next_step: int) -> bool:
        """Whether a server that expects step `next_step` next can still answer all that it has not answered.

        A server keeps its newest reply only.
        """
        computed = [number for number in self._expected if number < next_step]
        return next_step > self.replied and len(computed) <= 1

    @property
    def awaited(self) -> int | None:
        """Number of the first step that the server has been handed and has not answered; None if there is none."""
        first = next(iter(self._expected), None)  # those that it was handed come before the others
        return first if first is not None and self.is_handed(first) else None

    @property
    def may_be_repaired(self) -> bool:
        """Whether it makes sense to go on with the same server."""
        if self.error is None:
            return self.stale
        if self.replaced or self.retries >= MAX_RETRIES or self.leaving is not None:
            return False
        lost = isinstance(self.error, PeerLost) and not isinstance(self.error, PeerTimeout)
        return lost or isinstance(self.error, UnknownSession | WrongPosition)

    # Steps

    def on_call_begun(self, first: int) -> None:
        """The client begins the steps from number `first` on; they are timed together."""
        self._first_of_call = first
        self._largest_before = self._largest
        self._largest = max([outputs.values for outputs in self._expected.values()]) if self._expected else 0

    def on_expected(self, number: int, outputs: OutputShape, now: float) -> None:
        """A step is going to come to the server, from this client or from the server before."""
        self._largest = max(self._largest, outputs.values)
        is_newest = not self._expected or number >= next(reversed(self._expected))
        self._expected[number] = outputs
        if not is_newest:
            self._expected = dict(sorted(self._expected.items()))
        if len(self._expected) == 1:
            self.clock.on_expected(now)

    def on_input_received(self, number: int) -> None:
        """The input of a step has come to this client."""
        self.received = max(self.received, number)

    def on_delivered(self, number: int, outputs: OutputShape, now: float) -> None:
        """This client hands a step over."""
        self.delivered = number
        if number not in self._expected and number > self.replied and number not in self._void:
            self.on_expected(number, outputs, now)
        self._start_clock(number, now)

    def on_pushed(self, number: int, reliable: bool, now: float) -> None:
        """The server before says that it has handed the step on. The client waits for it only if that is `reliable`."""
        if number <= self.replied or number <= self.rejected:
            return
        self._seen_pushes.add(number)
        if reliable:
            self.pushed = max(self.pushed, number)
            self._start_clock(number, now)

    def on_reply(
        self,
        number: int,
        compute_seconds: float,
        was_pushed: bool,
        now: float,
        full: bool = True,
        sessions: int = 1,
    ) -> bool:
        """The server has answered an EXPECTED step. False if an answer before it was lost: it cannot be taken.

        Args:
            full: the step's tokens have passed all blocks.
            sessions: for how many the server computes.
        """
        if number > next(iter(self._expected)):
            self._on_reply_missed(number)
            return False
        outputs = self._expected.pop(number)
        continues = number > self._first_of_call
        self.clock.on_reply(number, outputs.tokens, compute_seconds, continues, now, full, sessions)
        self.last_was_pushed = was_pushed
        self.replied = number
        if number > self._newest:
            self._newest = number
            self.retries = 0
        if self._void:
            self._void = {step: values for step, values in self._void.items() if step > number}
        if self._seen_pushes:
            self._seen_pushes = set(filter(number.__lt__, self._seen_pushes))
        if self._expected:
            self._start_clock(next(iter(self._expected)), now)
        return True

    def on_given_up(self, after: int, copied_rows: bool) -> None:
        """The steps behind number `after` are given up: an answer to one may still come, and is ignored.

        Args:
            copied_rows: whether one of them copied rows, which a later step cannot set back.
        """
        for number in self.expected:
            if number > after:
                self._void[number] = self._expected.pop(number).values
        self.stale = self.stale or copied_rows

    # What goes wrong

    def on_refused(self, error: RemoteError, number: int | None) -> None:
        """The server refuses a step; None if it does not say which."""
        if number is not None and self.classify_reply(number) is ReplyKind.OUTDATED:
            return
        if isinstance(error, ServerClosing) and number is None:
            self.leaving = error
        elif isinstance(error, RequestRefused) and not self._is_own(number, error):
            # What was pushed was not right (perhaps we have not heard of the push yet), or the server has missed a step
            # before. The server before may be to blame: this client's own copy will show.
            first = next(iter(self._expected), self.rejected)
            self._seen_pushes.discard(number if number is not None else first)
            self.push_refused = True
            self.pushed = min(self.pushed, self.delivered)
            self.rejected = max(self.rejected, first if number is None else number)
        else:
            self.on_failed(error)

    def on_failed(self, error: Exception) -> None:
        """The hop cannot go on. The first error counts."""
        if self.error is None:
            self.error = error

    def on_departure_due(self) -> None:
        """No step is under way: a server that announced that it leaves is gone now."""
        if self.error is None and not self.stale:
            self.error = self.leaving

    def take_error(self) -> Exception:
        """The error, which is the client's own matter: the hop works on. Raises `ValueError` if there is none."""
        if self.error is None:
            raise ValueError("the hop has not failed")
        error, self.error = self.error, None
        return error

    # Repair

    def on_opened(self) -> None:
        """The session is open at the server, for the first time or again; what was under way is lost."""
        self.error = None
        self.delivered = self.pushed = self.replied

    def on_reopened(self, next_step: int) -> None:
        """A server that was lost lets the session in again and expects step `next_step` next."""
        self.stale = not self.can_answer(next_step) or self.stale

    def on_forgotten(self) -> None:
        """The server has forgotten steps, though it is connected: a refill helps."""
        self.error = None
        self.stale = True

    def on_replay_begun(self) -> None:
        """A refill begins. What is under way may still be refused and counts no more."""
        self.delivered = self.pushed = self.replied

    def on_misled(self, number: int, received: int) -> None:
        """What it has computed from step `number` on does not count: a new session at the server does all that again.

        Args:
            received: the last step whose input is still known.
        """
        self.stale = True
        self.replied = self.delivered = self.pushed = min(self.replied, number - 1)
        self.received = min(self.received, received)
        self.clock.stop()

    def on_refilled(self, done: int) -> None:
        """The cache is as it was after step `done`; later steps have to be handed over again."""
        self.stale = False
        self.replied = self.delivered = self.pushed = done
        self._expected = {number: outputs for number, outputs in self._expected.items() if number > done}
        self.clock.stop()

    def on_repair_ended(self, failure: Exception | None) -> None:
        """A repair has ended, well if `failure` is None."""
        self.retries += 1
        if failure is not None:
            self.error = failure

    def on_closed(self) -> None:
        """The session is over here. Its error is kept no longer together with all that it passed through."""
        if self.error is not None:
            without_frames(self.error)

    def on_joined(self, last_begun: int, received: int) -> None:
        """The hop takes its place in the chain, again or for the first time.

        Args:
            last_begun: number of the last step that has begun at the other hops.
            received: number of the last step whose input is known; some may have come during the repair.
        """
        self.catch_up_to = last_begun
        self.received = received

    def on_asked(self, number: int) -> None:
        """Another server was asked, because the answer to step `number` is late."""
        self.asked = number

    def on_replaced(self) -> None:
        """Another server takes its place."""
        self.replaced = True

    # Links

    def on_linked(self, pushes_onward: bool) -> None:
        """The server is told its neighbors."""
        self.pushes_onward = pushes_onward

    def on_pushes_stopped(self) -> None:
        """The server before no longer pushes, because that failed; what it has pushed may be lost as well."""
        self.push_refused = False
        self.pushed = min(self.pushed, max(self.delivered, self.replied))

    def _on_reply_missed(self, number: int) -> None:
        """An answer before that to `number` was lost, and the server remembers only the newest: refill its cache."""
        if self.retries < MAX_RETRIES:
            self.stale = True
        else:
            self.on_failed(ProtocolViolation(f"{self._server} answers step {number}, but never the one before"))

    def _is_own(self, number: int | None, error: RemoteError) -> bool:
        """Whether the refusal of a step (None: of any) means what this client delivered, not what was pushed.

        If both have handed it over and the server had missed a step before, the first refusal is that of the push.
        """
        if number is None:
            return self.delivered >= self.pushed and self.delivered > self.replied and self.delivered not in self._void
        return number <= self.delivered and not (isinstance(error, WrongPosition) and number in self._seen_pushes)

    def _start_clock(self, number: int, now: float) -> None:
        """Step `number` is on its way to the server, or the next one there."""
        first, tokens = None, 0
        for step, outputs in self._expected.items():
            if step > self.delivered and step > self.pushed:
                break
            first = step if first is None else first
            tokens += outputs.tokens
        if first is not None:
            self.clock.on_handed(number, first, tokens, now, self._expected[first].tokens)
