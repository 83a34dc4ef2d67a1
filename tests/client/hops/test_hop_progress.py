"""The state machine of one hop, without a network: each event, and random sequences of events."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import swarm.client
from swarm.client.hops.hop_progress import MAX_RETRIES, NO_DEADLINE, NO_STEP, HopProgress, ReplyKind
from swarm.client.wire.reply_checks import OutputShape
from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.errors import (
    CacheFull,
    NotFinite,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    ServerClosing,
    ServerFault,
    UnknownSession,
    WrongPosition,
)

ONE_TOKEN = OutputShape(1, 4)


def hop(*expected: int, replied: int = NO_STEP) -> HopProgress:
    """A hop that works and to which these steps are going to come."""
    progress = HopProgress("server x", TimeoutEstimator(0.1, 0.01, 60.0))
    progress.on_opened()
    if replied != NO_STEP:
        progress.on_refilled(replied)
    for number in expected:
        progress.on_expected(number, ONE_TOKEN, 0.0)
    return progress


def deliver(progress: HopProgress, *numbers: int, now: float = 0.0) -> None:
    for number in numbers:
        progress.on_delivered(number, ONE_TOKEN, now)


def answer(progress: HopProgress, number: int, now: float = 1.0) -> bool:
    return progress.on_reply(number, 0.01, False, now)


def test_a_step_that_begins_behind_another_does_not_excuse_that():
    """Else a client that keeps several steps under way would never find a server late."""
    progress = hop(0)
    deliver(progress, 0)
    deadline, waited = progress.deadline, progress.clock.waited(5.0)
    progress.on_expected(1, ONE_TOKEN, 4.0)
    assert progress.clock.waited(5.0) == waited
    deliver(progress, 1, now=4.0)
    assert progress.deadline - deadline < 1.0
    answer(progress, 0, now=6.0)
    assert progress.clock.waited(6.0) == 0.0


def test_giving_up_and_going_on_is_an_ordinary_transition():
    progress = hop(0, 1, 2)
    deliver(progress, 0, 1, 2)
    progress.on_given_up(after=0, copied_rows=False)
    assert progress.expected == [0]
    assert not progress.stale
    assert progress.classify_reply(1) is ReplyKind.OUTDATED
    progress.on_refused(NotFinite("no"), 2)
    assert progress.error is None
    progress.on_expected(3, ONE_TOKEN, 0.0)
    deliver(progress, 3)
    assert answer(progress, 0)
    assert answer(progress, 3)
    assert progress.replied == 3


def test_giving_up_between_a_failure_and_its_repair():
    progress = hop(0, 1, 2)
    deliver(progress, 0, 1, 2)
    assert answer(progress, 0)
    progress.on_failed(PeerLost("gone"))
    progress.on_given_up(after=1, copied_rows=False)
    assert progress.may_be_repaired
    progress.on_opened()
    progress.on_reopened(next_step=1)
    assert not progress.stale
    progress.on_repair_ended(None)
    progress.on_joined(2, 2)
    progress.on_expected(3, ONE_TOKEN, 0.0)
    assert progress.expected == [1, 3]
    assert not progress.is_handed(1)
    deliver(progress, 1, 3)
    assert answer(progress, 1)
    assert answer(progress, 3)


def test_a_given_up_step_that_copied_rows_needs_a_refill():
    progress = hop(0)
    progress.on_given_up(after=NO_STEP, copied_rows=True)
    assert progress.stale
    assert progress.may_be_repaired
    progress.on_replay_begun()
    progress.on_refilled(NO_STEP)
    assert not progress.stale


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (PeerLost("x"), True),
        (UnknownSession("x"), True),
        (WrongPosition("x"), True),
        (PeerTimeout("x"), False),
        (ServerFault("x"), False),
        (CacheFull("x"), False),
        (ProtocolViolation("x"), False),
    ],
)
def test_which_server_may_be_asked_again(error, again):
    progress = hop(0)
    progress.on_failed(error)
    assert progress.may_be_repaired == again
    for _ in range(MAX_RETRIES):
        progress.on_repair_ended(error)
    assert not progress.may_be_repaired


def test_a_new_answer_gives_new_retries():
    progress = hop(0)
    progress.on_repair_ended(None)
    assert progress.retries == 1
    deliver(progress, 0)
    assert answer(progress, 0)
    assert progress.retries == 0


def test_a_server_that_leaves_is_gone_between_two_steps():
    progress = hop(0)
    deliver(progress, 0)
    progress.on_refused(ServerClosing("moving"), None)
    assert progress.error is None
    assert answer(progress, 0)
    progress.on_departure_due()
    assert isinstance(progress.error, ServerClosing)
    assert not progress.may_be_repaired


def test_the_clients_own_error_leaves_the_hop_working():
    progress = hop(0)
    with pytest.raises(ValueError, match="not failed"):
        progress.take_error()
    progress.on_failed(NotFinite("no"))
    progress.on_failed(PeerLost("later"))
    assert isinstance(progress.take_error(), NotFinite)
    assert progress.error is None


def test_when_pushes_stop_the_client_delivers_what_was_pushed_and_not_answered():
    progress = hop(0, 1, 2, 3, 4)
    deliver(progress, 0, 1)
    for number in (2, 3, 4):
        progress.on_pushed(number, True, 0.0)
    assert answer(progress, 0)
    progress.on_pushes_stopped()
    assert [progress.is_handed(number) for number in range(5)] == [True, True, False, False, False]
    assert progress.expected == [1, 2, 3, 4]
    deliver(progress, 2, 3, 4)
    assert all(answer(progress, number) for number in (1, 2, 3, 4))


def test_when_pushes_stop_nothing_that_was_answered_is_delivered_again():
    progress = hop(0, 1, 2)
    for number in (0, 1):
        progress.on_pushed(number, True, 0.0)
    assert answer(progress, 0)
    assert answer(progress, 1)
    progress.on_pushes_stopped()
    assert [progress.is_handed(number) for number in range(3)] == [True, True, False]


def test_an_unreliable_push_is_not_waited_for():
    progress = hop(0, 1)
    progress.on_pushed(0, False, 0.0)
    assert (progress.pushed, progress.deadline) == (NO_STEP, NO_DEADLINE)
    progress.on_pushed(1, True, 0.0)
    assert progress.pushed == 1


class AnyHistory(RuleBasedStateMachine):
    """Events in any order that a chain could send; the server answers in order what it was handed and kept."""

    @initialize()
    def start(self) -> None:
        self.progress = hop()
        self.next = 0
        self.now = 0.0
        self.live: list[int] = []

    @rule(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.progress.on_call_begun(self.next)
        for number in range(self.next, self.next + count):
            self.progress.on_expected(number, OutputShape(number % 5 + 1, 4), self.now)
            self.progress.on_input_received(number)
            self.live.append(number)
        self.next += count

    def upcoming(self) -> int | None:
        return next((number for number in self.live if not self.progress.is_handed(number)), None)

    @precondition(lambda self: self.progress.error is None and not self.progress.stale and self.upcoming() is not None)
    @rule(pushed=st.booleans())
    def hand_over(self, pushed: bool) -> None:
        number = self.upcoming()
        if pushed:
            self.progress.on_pushed(number, True, self.now)
        if not self.progress.is_handed(number):
            self.progress.on_delivered(number, self.progress.outputs(number), self.now)

    @precondition(lambda self: self.handed())
    @rule(seconds=st.floats(0, 10), missing=st.booleans())
    def reply(self, seconds: float, missing: bool) -> None:
        self.now += seconds
        handed = self.handed()
        number = handed[-1] if missing else handed[0]
        assert self.progress.classify_reply(number) is ReplyKind.EXPECTED
        before = self.progress.replied
        if self.progress.on_reply(number, 0.0, False, self.now):
            assert number == handed[0]
            self.live.remove(number)
        else:
            assert self.progress.replied == before
            assert self.progress.stale or self.progress.error is not None

    def handed(self) -> list[int]:
        return [number for number in self.live if self.progress.is_handed(number)]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), copied=st.booleans())
    def give_up(self, data: st.DataObject, copied: bool) -> None:
        after = data.draw(st.integers(self.live[0] - 1, self.live[-1]))
        self.progress.on_given_up(after, copied)
        void = [number for number in self.live if number > after]
        self.live = [number for number in self.live if number <= after]
        assert all(self.progress.classify_reply(number) is ReplyKind.OUTDATED for number in void)

    @rule()
    def lose_connection(self) -> None:
        self.progress.on_failed(PeerLost("gone"))

    @precondition(lambda self: self.progress.error is not None or self.progress.stale)
    @rule(refill=st.booleans(), next_step=st.integers(0, 8))
    def repair(self, refill: bool, next_step: int) -> None:
        done = min(self.progress.replied, self.progress.received)
        self.progress.on_opened()
        self.progress.on_reopened(next_step)
        if refill or self.progress.stale:
            self.progress.on_replay_begun()
            self.progress.on_refilled(done)
        self.progress.on_repair_ended(None)
        self.progress.on_joined(self.next - 1, self.next - 1)
        assert self.progress.error is None
        assert not self.progress.stale

    @invariant()
    def what_is_awaited_is_what_is_wanted(self) -> None:
        if not hasattr(self, "live"):
            return
        assert self.progress.expected == self.live
        assert self.progress.replied < min(self.live, default=self.next)
        if not self.handed():
            assert self.upcoming() == (self.live[0] if self.live else None)


def test_whatever_happens_the_wanted_steps_and_only_those_are_awaited():
    run_state_machine_as_test(AnyHistory, settings=settings(max_examples=150, deadline=None))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_the_deadline_covers_all_steps_under_way(tokens):
    progress = HopProgress("server x", TimeoutEstimator(0.1, 0.01, 60.0))
    deadlines = []
    for number, count in enumerate(tokens):
        progress.on_expected(number, OutputShape(count, 4), 0.0)
        progress.on_delivered(number, OutputShape(count, 4), 0.0)
        deadlines.append(progress.deadline)
    assert deadlines == sorted(deadlines)
    assert progress.deadline == TimeoutEstimator(0.1, 0.01, 60.0).timeout(sum(tokens))


def test_only_events_change_it():
    """No other module assigns to an attribute of a hop's progress."""
    for path in Path(swarm.client.__file__).parent.rglob("*.py"):
        if path.name == "hop_progress.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
                if isinstance(target, ast.Attribute):
                    owner = ast.unparse(target.value)
                    assert not owner.endswith(("progress", "progress.clock")), f"{path.name}:{node.lineno}"
