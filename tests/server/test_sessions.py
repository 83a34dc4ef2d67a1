from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.data_structures import Span, WireFormat
from swarm.errors import CacheFull, UnknownSession, WrongSpan
from swarm.server.sessions import GRACE, IDLE, LINKING, Session, Sessions
from tests import virtual_time

CAPACITY = 100


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def session(number: int = 0, peer: str = "peer", max_length: int = 10, span: Span | None = None) -> Session:
    cache: Any = SimpleNamespace()
    return Session(
        session_id=number.to_bytes(16, "big"),
        peer_id=peer,
        span=span or Span(0, 3),
        max_length=max_length,
        reply_format=WireFormat.NONE,
        cache=cache,
        last_seen=0.0,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock) -> Sessions:
    return Sessions(CAPACITY, clock)


def test_rows_are_counted_when_they_are_first_seen(sessions):
    one = sessions.open(session(max_length=10))
    assert (len(sessions), sessions.free) == (1, 100)
    sessions.reserve(one, 3)
    assert (one.reserved, sessions.free) == (30, 70)
    sessions.reserve(one, 3)
    assert sessions.free == 70
    sessions.reserve(one, 5)
    assert sessions.free == 50
    sessions.reserve(one, 1)  # rows that ended may come back
    assert sessions.free == 50


def test_closing_frees_the_cache_and_may_be_repeated(sessions):
    one = sessions.open(session())
    sessions.reserve(one, 10)
    sessions.close(one)
    sessions.close(one)
    assert (len(sessions), sessions.free) == (0, CAPACITY)


def test_a_session_that_can_never_fit(sessions):
    with pytest.raises(CacheFull, match=r"101 tokens .* 100 of 100 are free"):
        sessions.open(session(max_length=101))
    assert len(sessions) == 0


def test_no_room_for_another_session(sessions):
    sessions.reserve(sessions.open(session(1)), 9)
    with pytest.raises(CacheFull, match=r"11 tokens .* 10 of 100 are free"):
        sessions.open(session(2, max_length=11))
    sessions.open(session(2, max_length=10))


def test_no_room_for_more_rows_changes_nothing(sessions):
    one, two = sessions.open(session(1)), sessions.open(session(2))
    sessions.reserve(one, 6)
    sessions.reserve(two, 3)
    with pytest.raises(CacheFull, match=r"20 tokens .* 10 of 100 are free"):
        sessions.reserve(two, 5)
    assert (two.rows, sessions.free) == (3, 10)
    sessions.reserve(two, 4)
    assert sessions.free == 0


def test_what_expired_makes_room(sessions, clock):
    one = sessions.open(session(1))
    sessions.reserve(one, 10)
    sessions.detach(one)
    clock.now += GRACE + 1
    two = sessions.open(session(2))
    sessions.reserve(two, 10)
    assert (len(sessions), sessions.free) == (1, 0)


def test_a_client_that_is_gone_has_a_while_to_come_back(sessions, clock):
    one = sessions.open(session())
    one.next_step = 4
    sessions.detach(one)
    clock.now += GRACE
    sessions.expire()
    assert sessions.open(session()) is one
    clock.now += GRACE + 1
    sessions.expire()
    assert len(sessions) == 1


def test_after_the_grace_it_is_a_new_session(sessions, clock):
    one = sessions.open(session())
    sessions.detach(one)
    clock.now += GRACE + 1
    assert sessions.open(session()) is not one
    assert len(sessions) == 1


def test_a_connected_client_may_think_for_long_but_not_for_ever(sessions, clock):
    sessions.open(session())
    clock.now += IDLE
    sessions.expire()
    assert len(sessions) == 1
    clock.now += 1
    sessions.expire()
    assert len(sessions) == 0


def test_steps_are_signs_of_life(sessions, clock):
    one = sessions.open(session())
    for _ in range(3):
        clock.now += IDLE - 1
        sessions.reserve(one, 1)
    sessions.expire()
    assert len(sessions) == 1


def test_one_of_two_connections_ends(sessions, clock):
    one = sessions.open(session())
    assert sessions.open(session()) is one
    sessions.detach(one)
    clock.now += GRACE + 1
    sessions.expire()
    assert len(sessions) == 1
    sessions.detach(one)
    clock.now += GRACE + 1
    sessions.expire()
    assert len(sessions) == 0


def test_a_session_that_computes_does_not_expire(sessions, clock):
    async def scenario():
        one = sessions.open(session())
        sessions.detach(one)
        async with one.lock:
            clock.now += IDLE * 2
            sessions.expire()
            assert len(sessions) == 1
        sessions.expire()
        assert len(sessions) == 0

    asyncio.run(scenario())


def test_an_expired_session_cannot_reserve(sessions, clock):
    one = sessions.open(session())
    clock.now += IDLE + 1
    sessions.expire()
    with pytest.raises(UnknownSession):
        sessions.reserve(one, 1)
    assert sessions.free == CAPACITY


def test_the_same_id_of_another_peer_is_another_session(sessions):
    mine, theirs = sessions.open(session(peer="me")), sessions.open(session(peer="them"))
    assert mine is not theirs
    sessions.reserve(mine, 2)
    sessions.close(theirs)
    assert (len(sessions), sessions.free) == (1, 80)
    sessions.reserve(mine, 3)


@pytest.mark.parametrize("change", [{"span": Span(0, 2)}, {"max_length": 11}], ids=str)
def test_an_open_session_cannot_be_opened_as_another_one(sessions, change):
    sessions.open(session())
    with pytest.raises(WrongSpan, match="open for blocks 0:3 and 10 tokens"):
        sessions.open(session(**change))


def test_a_forgotten_session_has_no_part_in_its_successor(sessions):
    """Else a client could fill memory that nobody counts, with a connection from before."""
    old = sessions.open(session())
    sessions.close(old)
    new = sessions.open(session())
    assert new is not old
    with pytest.raises(UnknownSession):
        sessions.reserve(old, 5)
    sessions.reserve(new, 1)
    sessions.close(old)
    assert (len(sessions), sessions.free) == (1, 90)


class FakeLink:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("end", ["close", "clear", "expire", "unlink"])
def test_the_link_of_a_session_ends_with_it(sessions, clock, end):
    one: Any = sessions.open(session())
    link = one.link = FakeLink()
    if end == "unlink":
        one.unlink()
    elif end == "clear":
        sessions.clear()
    elif end == "close":
        sessions.close(one)
    else:
        sessions.detach(one)
        clock.now += GRACE + 1
        sessions.expire()
    assert link.closed
    assert one.link is None


def test_closing_a_predecessor_leaves_the_link_of_its_successor(sessions):
    old: Any = sessions.open(session())
    sessions.close(old)
    new: Any = sessions.open(session())
    link = new.link = FakeLink()
    sessions.close(old)
    assert not link.closed


def test_who_may_push(sessions):
    async def scenario():
        loop = asyncio.get_running_loop()
        mine, theirs = sessions.open(session(peer="me")), sessions.open(session(peer="them"))
        mine.let_push("before")
        number = mine.session_id
        assert await sessions.pushed_by("before", "me", number) is mine
        for previous, client, session_id in [
            ("other", "me", number),
            ("before", "them", number),
            ("me", "me", number),
            ("before", "nobody", number),
            ("before", "me", bytes(15) + b"x"),
        ]:
            began = loop.time()
            with pytest.raises(UnknownSession, match="no session here into which this peer may push"):
                await sessions.pushed_by(previous, client, session_id)
            assert loop.time() - began <= LINKING
        sessions.close(mine)
        with pytest.raises(UnknownSession):
            await sessions.pushed_by("before", "me", number)
        assert theirs.previous is None

    virtual_time.run(scenario)


def test_a_push_waits_for_its_link_through_others(sessions):
    async def scenario():
        loop = asyncio.get_running_loop()
        one = sessions.open(session())
        pushing = asyncio.create_task(sessions.pushed_by("third", "peer", one.session_id))
        for name in ("first", "second", "third"):
            await asyncio.sleep(LINKING / 4)
            assert not pushing.done()
            one.let_push(name)
        assert await pushing is one
        assert loop.time() == pytest.approx(LINKING * 3 / 4)

    virtual_time.run(scenario)


def test_the_newest_connection_is_the_clients(sessions):
    old: Any = object()
    new: Any = object()
    one = sessions.open(session(1), old)
    other = sessions.open(session(2), None)
    assert sessions.clients() == [old]
    sessions.open(session(1), new)
    assert sessions.clients() == [new]
    sessions.detach(one, old)
    assert sessions.clients() == [new]
    sessions.detach(one, new)
    assert sessions.clients() == []
    assert (one.attached, other.attached) == (0, 1)


def test_check_tells_who_was_forgotten(sessions, clock):
    one = sessions.open(session())
    sessions.check(one)
    clock.now += IDLE + 1
    sessions.expire()
    with pytest.raises(UnknownSession, match="expired"):
        sessions.check(one)
    sessions.open(session())
    with pytest.raises(UnknownSession):
        sessions.check(one)


class Accountant(RuleBasedStateMachine):
    """Whatever clients do, what the open sessions hold and what is free add up to the capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sessions = Sessions(CAPACITY, self.clock)
        self.known: list[Session] = []

    @rule(number=st.integers(0, 3), peer=st.sampled_from("ab"), max_length=st.sampled_from([5, 10, 60]))
    def open(self, number, peer, max_length):
        try:
            opened = self.sessions.open(session(number, peer, max_length))
        except (CacheFull, WrongSpan):
            return
        if all(opened is not one for one in self.known):
            self.known.append(opened)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), rows=st.integers(1, 12))
    def reserve(self, data, rows):
        one = data.draw(st.sampled_from(self.known))
        before, free = one.rows, self.sessions.free
        try:
            self.sessions.reserve(one, rows)
        except CacheFull:
            assert (rows - before) * one.max_length > free
            assert one.rows == before
        except UnknownSession:
            assert one.rows == before
        else:
            assert one.rows >= rows
            assert self.is_open(one)

    def is_open(self, one):
        return any(one is other for other in self.sessions._sessions.values())

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data):
        one = data.draw(st.sampled_from(self.known))
        others = [other for other in self.known if other is not one and self.is_open(other)]
        self.sessions.close(one)
        assert not self.is_open(one)
        assert all(self.is_open(other) for other in others)

    @precondition(lambda self: any(one.attached for one in self.known))
    @rule(data=st.data())
    def detach(self, data):
        self.sessions.detach(data.draw(st.sampled_from([one for one in self.known if one.attached])))

    @rule(seconds=st.sampled_from([1.0, GRACE + 1, IDLE + 1]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.sessions.expire()

    @invariant()
    def the_sum_is_right(self):
        assert 0 <= self.sessions.free <= CAPACITY
        held = sum(one.rows * one.max_length for one in self.known if self.is_open(one))
        assert self.sessions.free == CAPACITY - held


TestAccountant = Accountant.TestCase
TestAccountant.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
