from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.data_structures import Span, WireFormat
from swarm.errors import CacheFull, UnknownSession, WrongSpan
from swarm.server.memory import IDLE_AFTER_S, MAKE_ROOM_PERIOD_S
from swarm.server.sessions import session_table
from swarm.server.sessions.session import Session, SessionTerms
from swarm.server.sessions.session_table import (
    IDLE_TIMEOUT_S,
    RECONNECT_TIMEOUT_S,
    CacheSizes,
    SessionTable,
)
from tests import virtual_time
from tests.async_tests import as_test
from tests.server.conversations import even_sizes

CAPACITY = 100
T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def session(
    number: int = 0,
    peer: str = "peer",
    max_length: int = 10,
    span: Span | None = None,
    adapters: list[bytes] | None = None,
    wait_timeout_s: float = 0.0,
    early_exits: bool = False,
) -> Session:
    cache: Any = SimpleNamespace(cleared=0)
    cache.clear = lambda: setattr(cache, "cleared", cache.cleared + 1)
    terms = SessionTerms(
        session_id=number.to_bytes(16, "big"),
        peer_id=peer,
        span=span or Span(0, 3),
        max_length=max_length,
        reply_format=WireFormat.NONE,
        adapters=adapters,
        wait_timeout_s=wait_timeout_s,
        early_exits=early_exits,
    )
    return Session(terms, cache)


def test_states_are_reserved_once_for_each_sequence():
    """In blocks that have them: the first and the last keep a state, the one between keeps keys and values."""
    sizes = CacheSizes(Span(4, 7), (0, 6, 0), (300, 0, 300), token_buffer=1, sequence_buffer=60, unit=10)
    sessions = SessionTable(1000, Clock(), peer_share=1.0, sizes=sizes)
    for span, rows, reserved in ((Span(4, 7), 1, 101), (Span(4, 7), 2, 202), (Span(5, 6), 1, 35), (Span(4, 5), 3, 123)):
        terms = session(1, max_length=50, span=span).terms
        assert sessions.tokens_reserved(terms, rows) == reserved


def test_rows_take_whole_pages():
    sessions = SessionTable(CAPACITY, Clock(), peer_share=1.0, page=16)
    assert sessions.capacity == 96
    one = opened(sessions, session(1, max_length=17), rows=2)
    assert sessions.free == 96 - 2 * 32
    with pytest.raises(CacheFull):
        reserve(sessions, one, 4)
    opened(sessions, session(2, max_length=32))
    assert sessions.free == 0


def test_a_session_reserves_the_share_of_its_blocks_rounded_up():
    sessions = SessionTable(CAPACITY, Clock(), peer_share=1.0, sizes=even_sizes(Span(0, 3)))
    one = opened(sessions, session(1, max_length=10, span=Span(1, 2)))
    assert sessions.free == CAPACITY - 4
    for rows, reserved in ((2, 7), (3, 10), (4, 14)):
        reserve(sessions, one, rows)
        assert sessions.free == CAPACITY - reserved
    two = opened(sessions, session(2, max_length=85, span=Span(0, 3)))
    assert sessions.free == 1
    with pytest.raises(CacheFull, match=r"3 tokens .* 1 of 100 are free"):
        reserve(sessions, one, 5)
    sessions.close(one)
    sessions.close(two)
    assert sessions.free == CAPACITY


@given(
    blocks=st.integers(1, 40),
    buffer_blocks=st.integers(0, 20),
    length=st.integers(1, 40),
    max_length=st.integers(1, 5000),
    rows=st.integers(0, 20),
)
def test_a_session_on_few_blocks_reserves_its_buffers_too(blocks, buffer_blocks, length, max_length, rows):
    sessions = SessionTable(CAPACITY, Clock(), sizes=even_sizes(Span(0, blocks), buffer_blocks))
    part = sessions.tokens_reserved(session(0, max_length=max_length, span=Span(0, min(blocks, length))).terms, rows)
    whole = sessions.tokens_reserved(session(0, max_length=max_length, span=Span(0, blocks)).terms, rows)
    assert whole == rows * max_length  # the same as if buffers were not counted
    # In units of the memory that a token takes in one block, of which the server has `CAPACITY * blocks` for cache:
    assert part * (blocks + buffer_blocks) >= rows * max_length * (min(blocks, length) + buffer_blocks)
    assert part <= whole


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises that does not have to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("it waits")


def opened(sessions: SessionTable, one: Session, rows: int = 1, client: Any = None) -> Session:
    return at_once(sessions.open_session(one, rows, client))


def reserve(sessions: SessionTable, one: Session, rows: int) -> None:
    at_once(sessions.reserve_cache(one, rows))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock) -> SessionTable:
    return SessionTable(CAPACITY, clock, peer_share=1.0)


def test_rows_are_counted_when_they_are_first_seen(sessions):
    one = opened(sessions, session(max_length=10))
    assert (len(sessions), one.sequences, sessions.free) == (1, 1, 90)
    reserve(sessions, one, 3)
    assert (one.sequences, sessions.free) == (3, 70)
    reserve(sessions, one, 3)
    assert sessions.free == 70
    reserve(sessions, one, 5)
    assert sessions.free == 50
    reserve(sessions, one, 1)  # rows that ended may come back
    assert sessions.free == 50


def test_a_client_that_is_gone_has_a_while_to_come_back(sessions, clock):
    one = opened(sessions, session())
    one.next_step = 4
    sessions.detach(one)
    clock.now += RECONNECT_TIMEOUT_S
    sessions.expire()
    assert opened(sessions, session()) is one
    clock.now += RECONNECT_TIMEOUT_S + 1
    sessions.expire()
    assert len(sessions) == 1


@pytest.fixture
def asked(sessions) -> list[Session]:
    """The sessions that were asked to leave."""
    found: list[Session] = []
    sessions.ask_to_leave = found.append
    return found


def test_an_idle_session_makes_room_for_another(sessions, clock, asked):
    one, two = opened(sessions, session(1), 5), opened(sessions, session(2), 5)
    clock.now += IDLE_AFTER_S
    with pytest.raises(CacheFull):
        opened(sessions, session(3, "other"), 2)
    clock.now += 1
    reserve(sessions, two, 5)  # which is used now
    opened(sessions, session(3, "other"), 2)
    assert asked == [one]
    assert sessions.free == 30
    assert one.cache.cleared == 1
    with pytest.raises(UnknownSession):
        reserve(sessions, one, 1)


def test_a_session_that_is_computed_is_not_idle(sessions, clock, asked):
    async def scenario():
        one = opened(sessions, session(1), 10)
        clock.now += 10 * IDLE_AFTER_S
        async with one.lock:
            with pytest.raises(CacheFull):
                opened(sessions, session(2, "other"), 2)
        opened(sessions, session(2, "other"), 2)
        assert asked == [one]

    asyncio.run(scenario())


def test_a_peer_gives_back_what_it_holds_beyond_its_share(clock):
    """Even if it works all the time."""
    sessions = SessionTable(CAPACITY, clock, peer_share=0.75)
    for number in range(7):
        opened(sessions, session(number, "greedy"))
    for peer in ("modest", "third", "fourth"):
        opened(sessions, session(8, peer))
    assert sessions.free == 0
    with pytest.raises(CacheFull):
        opened(sessions, session(9, "modest"))  # beyond its share, and nobody is idle
    opened(sessions, session(8, "fifth"))
    assert len(sessions) == 10
    opened(sessions, session(8, "modest"))  # what is within a share stays


def test_a_connected_client_may_think_for_long_but_not_for_ever(sessions, clock):
    opened(sessions, session())
    clock.now += IDLE_TIMEOUT_S
    sessions.expire()
    assert len(sessions) == 1
    clock.now += 1
    sessions.expire()
    assert len(sessions) == 0


def test_one_of_two_connections_ends(sessions, clock):
    one = opened(sessions, session())
    assert opened(sessions, session()) is one
    sessions.detach(one)
    clock.now += RECONNECT_TIMEOUT_S + 1
    sessions.expire()
    assert len(sessions) == 1
    sessions.detach(one)
    clock.now += RECONNECT_TIMEOUT_S + 1
    sessions.expire()
    assert len(sessions) == 0


def test_a_session_that_computes_does_not_expire(sessions, clock):
    async def scenario():
        one = opened(sessions, session())
        sessions.detach(one)
        async with one.lock:
            clock.now += IDLE_TIMEOUT_S * 2
            sessions.expire()
            assert len(sessions) == 1
        sessions.expire()
        assert len(sessions) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"span": Span(0, 2)}, "open for blocks 0:3 and 10 tokens"),
        ({"max_length": 11}, "open for blocks 0:3 and 10 tokens"),
        ({"adapters": [b""] * 3}, "other adapters"),
        ({"early_exits": True}, "another early_exits"),
    ],
)
def test_an_open_session_cannot_be_opened_as_another_one(sessions, change, words):
    opened(sessions, session())
    with pytest.raises(WrongSpan, match=words):
        opened(sessions, session(**change))


def test_a_forgotten_session_has_no_part_in_its_successor(sessions):
    """Else a client could fill memory that nobody counts, with a connection from before."""
    old = opened(sessions, session())
    sessions.close(old)
    new = opened(sessions, session())
    assert new is not old
    with pytest.raises(UnknownSession):
        reserve(sessions, old, 5)
    reserve(sessions, new, 1)
    sessions.close(old)
    assert (len(sessions), sessions.free) == (1, 90)


def test_the_newest_connection_is_the_clients(sessions):
    old: Any = object()
    new: Any = object()
    one = opened(sessions, session(1), 1, old)
    other = opened(sessions, session(2))
    assert sessions.clients() == [old]
    opened(sessions, session(1), 1, new)
    assert sessions.clients() == [new]
    sessions.detach(one, old)
    assert sessions.clients() == [new]
    sessions.detach(one, new)
    assert sessions.clients() == []
    assert (one.attached, other.attached) == (0, 1)


def test_a_connection_that_is_refused_takes_nothing_from_the_one_that_works(sessions):
    working: Any = object()
    one = opened(sessions, session(), 5, working)
    with pytest.raises(CacheFull):
        opened(sessions, session(), 11, object())
    assert (one.sequences, one.attached, sessions.free) == (5, 1, 50)
    assert sessions.clients() == [working]


def test_a_peer_has_a_bounded_number_of_sessions_and_a_part_of_the_cache(clock, monkeypatch):
    monkeypatch.setattr(session_table, "MAX_PEER_SESSIONS", 3)
    sessions = SessionTable(CAPACITY, clock, peer_share=0.5)
    ours = [opened(sessions, session(number)) for number in range(3)]
    with pytest.raises(CacheFull, match="a peer may have 3 sessions"):
        opened(sessions, session(3))
    assert opened(sessions, session(0)) is ours[0]  # which is no new one
    with pytest.raises(CacheFull, match="30 of the 50 that one peer may have"):
        reserve(sessions, ours[0], 4)
    opened(sessions, session(0, "other"), 5)
    sessions.close(ours[0])
    opened(sessions, session(3))


def patient(number: int = 0, peer: str = "peer", patience: float = 20.0, **options: Any) -> Session:
    return session(number, peer, wait_timeout_s=patience, **options)


Scenario = Callable[[SessionTable], Awaitable[None]]


def on_virtual_time(scenario: Scenario) -> None:
    """A scenario with sessions whose clock is the loop's."""

    async def whole() -> None:
        await scenario(SessionTable(CAPACITY, asyncio.get_running_loop().time, peer_share=1.0))

    virtual_time.run(whole)


table_test = as_test(on_virtual_time, "sessions")


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("end", ["close", "expire", "fewer"])
@table_test()
async def test_who_waits_gets_the_room_that_another_session_leaves(sessions, end):
    holder = await sessions.open_session(session(1), 8)
    if end == "expire":
        await asyncio.sleep(1)
        sessions.detach(holder)
        gone = now() + RECONNECT_TIMEOUT_S
    else:
        gone = now() + 5
        asyncio.get_running_loop().call_at(gone, sessions.close, holder)
    waiting = await sessions.open_session(
        patient(2, peer="other", patience=RECONNECT_TIMEOUT_S + 5), 2 if end == "fewer" else 5
    )
    if end == "fewer":
        assert now() == 0  # there was room at once
    else:
        assert gone <= now() <= gone + MAKE_ROOM_PERIOD_S + 1e-6
        assert (len(sessions), sessions.free) == (1, 50)
    sessions.require_open(waiting)


@pytest.mark.parametrize(("begun", "moment"), [(False, "while it waits"), (True, "as it is granted")])
@table_test()
async def test_a_wait_that_is_broken_off_leaves_nothing_behind(sessions, begun, moment):
    other = await sessions.open_session(session(1), 8)
    one = await sessions.open_session(patient(2), 1) if begun else patient(2)
    waiting = asyncio.create_task(sessions.reserve_cache(one, 6) if begun else sessions.open_session(one, 6))
    await asyncio.sleep(1)
    if moment != "while it waits":
        sessions.close(other)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    sessions.close(other)
    assert (one.sequences, sessions.free) == ((1, 90) if begun else (0, 100))
    assert len(sessions) == begun
    again = await sessions.open_session(patient(2), 10)
    assert (again.sequences, sessions.free) == (10, 0)


@table_test()
async def test_two_connections_that_open_a_session_at_once_reserve_its_rows_once(sessions):
    other = await sessions.open_session(session(1), 8)
    tasks = [asyncio.create_task(sessions.open_session(patient(2), 3)) for _ in range(3)]
    await asyncio.sleep(1)
    sessions.close(other)
    first, *others = await asyncio.gather(*tasks)
    assert all(one is first for one in others)
    assert (first.attached, first.sequences, sessions.free) == (3, 3, 70)


@pytest.mark.parametrize("begun", [False, True], ids=["opening", "growing"])
@table_test()
async def test_a_session_that_is_closed_while_it_waits_is_over_at_once(sessions, begun):
    other = await sessions.open_session(session(1), 8)
    one = await sessions.open_session(patient(2), 1) if begun else patient(2)
    waiting = asyncio.create_task(sessions.reserve_cache(one, 6) if begun else sessions.open_session(one, 6))
    behind = asyncio.create_task(sessions.open_session(patient(3, patience=30), 5))
    await asyncio.sleep(1)
    sessions.close(one)
    with pytest.raises(UnknownSession):
        await waiting
    assert now() == 1
    sessions.close(other)
    assert (await behind).sequences == 5  # nobody dead stands in the line
    assert (now(), len(sessions), sessions.free) == (1, 1, 50)


class Ledger(RuleBasedStateMachine):
    """Whatever clients do, what the open sessions hold and what is free add up to the capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sessions = SessionTable(CAPACITY, self.clock, peer_share=1.0, sizes=even_sizes(Span(0, 3)))
        self.known: list[Session] = []

    @rule(
        number=st.integers(0, 3),
        peer=st.sampled_from("ab"),
        max_length=st.sampled_from([5, 10, 60]),
        span=st.sampled_from([Span(0, 3), Span(0, 1), Span(1, 3)]),
        rows=st.integers(1, 3),
    )
    def open(self, number, peer, max_length, span, rows):
        try:
            one = opened(self.sessions, session(number, peer, max_length, span), rows)
        except (CacheFull, WrongSpan):
            return
        assert one.sequences >= rows
        if all(one is not other for other in self.known):
            self.known.append(one)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), rows=st.integers(1, 12))
    def reserve(self, data, rows):
        one = data.draw(st.sampled_from(self.known))
        before, free = one.sequences, self.sessions.free
        try:
            reserve(self.sessions, one, rows)
        except CacheFull:
            assert self.reserved(one, rows) - self.reserved(one, before) > free
            assert one.sequences == before
        except UnknownSession:
            assert one.sequences == before
        else:
            assert one.sequences >= rows
            assert self.is_open(one)

    def reserved(self, one, rows):
        return math.ceil(rows * one.terms.max_length * Fraction(one.terms.span.length, 3))

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

    @rule(seconds=st.sampled_from([1.0, RECONNECT_TIMEOUT_S + 1, IDLE_TIMEOUT_S + 1]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.sessions.expire()

    @invariant()
    def the_sum_is_right(self):
        assert 0 <= self.sessions.free <= CAPACITY
        held = sum(self.reserved(one, one.sequences) for one in self.known if self.is_open(one))
        assert self.sessions.free == CAPACITY - held


TestLedger = Ledger.TestCase
TestLedger.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
