"""What sessions leave: who may begin with it, and who has to give room. Times are virtual."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span, WireFormat
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.server.sessions.parked_caches import MIN_PARKED_TOKENS, ParkedCaches
from swarm.server.sessions.session import SessionTerms
from tests.server.conversations import OPEN, changed, in_virtual_time, make_model

LONG = 40
"""Tokens that a session leaves."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    return make_model(tmp_path_factory.mktemp("checkpoint"))


def named(number: int, of: int | None = None, length: int = LONG, **changes: Any) -> messages.OpenSession:
    """A session, which begins with what session `of` has."""
    prefix = messages.PrefixOf(identity(of), length) if of is not None else None
    return changed(OPEN, session_id=identity(number), max_length=LONG + 20, prefix=prefix, **changes)


def identity(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def left(server: Any, number: int = 0, keep: int = LONG, client: str = "one", **changes: Any) -> torch.Tensor:
    """Open a session, compute `LONG` tokens, and leave some of them; all inputs."""
    talk = await (await server.client(client)).begin(named(number, **changes), tokens=16)
    for _ in range(2):
        await talk.right_step(12)
    await talk.stream.send(messages.CloseSession(keep))
    await server.until(lambda: not len(server.sessions))
    return talk.history


async def begun(server: Any, message: messages.OpenSession, history: torch.Tensor, client: str = "one") -> int:
    """With how many tokens a session begins. Those that follow are right."""
    talk, others = await server.client(client), len(server.sessions)
    reply, _ = await talk.ask(message)
    assert isinstance(reply, messages.SessionOpened), reply
    talk.history = history[: reply.begun]
    await talk.right_step(3)
    await talk.right_step(1)
    await talk.stream.send(messages.CloseSession())
    await server.until(lambda: len(server.sessions) == others)
    return reply.begun


@in_virtual_time(capacity=200)
async def test_a_session_begins_with_what_another_one_has_left(server):
    history = await left(server)
    assert server.sessions.free == 200
    for number, length in enumerate((LONG, 17, LONG, 1), 1):
        assert await begun(server, named(number, of=0, length=length), history) == length


@in_virtual_time(capacity=200)
async def test_a_session_begins_with_what_another_one_has(server):
    one = await server.client("one")
    await one.begin(named(0), tokens=16)
    for length in (16, 9):
        assert await begun(server, named(length, of=0, length=length), one.history) == length
    await one.right_step(5)
    assert await begun(server, named(1, of=0, length=17), one.history) == 17
    assert await begun(server, named(2, of=0, length=30), one.history) == 0  # which it has not


@in_virtual_time(capacity=300)
async def test_who_may_not_begin_with_it(server):
    """Other peers, and those for whom the blocks would have computed something else."""
    history = await left(server)
    assert await begun(server, named(1, of=0), history, client="two") == 0
    assert await begun(server, named(2, of=0, sequences=2), history) == 0
    assert await begun(server, named(3, of=0, early_exits=True), history) == 0
    assert await begun(server, named(4, of=9), history) == 0
    assert await begun(server, named(5, of=5), history) == 0
    part = await server.client("one")
    assert (await part.ask(named(6, of=0, start=2)))[0] == messages.SessionOpened(0)
    assert await begun(server, named(7, of=0), history) == LONG


@in_virtual_time(capacity=200)
async def test_what_is_not_kept(server):
    for number, keep in enumerate((0, MIN_PARKED_TOKENS - 1, LONG + 1, 2**31 - 1)):
        await left(server, number, keep)
    await left(server, 5, early_exits=True)
    await left(server, 6, sequences=2)
    assert len(server.sessions.parked) == 0


@in_virtual_time(capacity=200)
async def test_a_longer_one_takes_the_place_of_that_with_which_it_began(server):
    history = await left(server)
    talk = await server.client("one")
    await talk.ask(named(1, of=0))
    talk.history = history
    await talk.right_step(4)
    await talk.stream.send(messages.CloseSession(LONG + 4))
    await server.until(lambda: not len(server.sessions))
    assert server.sessions.parked.tokens == LONG + 4
    assert await begun(server, named(2, of=0), history) == 0
    assert await begun(server, named(3, of=1), history) == LONG


@in_virtual_time(capacity=200)
async def test_an_id_that_is_used_again(server):
    for _ in range(3):
        history = await left(server)
    assert server.sessions.parked.tokens == LONG
    assert await begun(server, named(1, of=0), history) == LONG
    server.sessions.parked.fit(0)
    assert server.sessions.parked.tokens == 0


@in_virtual_time(capacity=120)
async def test_it_gives_room_to_whoever_opens_a_session(server):
    """Two peers have left 40 tokens each, of 120; sessions of 60 come. The tail goes first."""
    first, second = await left(server, 0, client="one"), await left(server, 1, client="two")
    assert server.sessions.parked.tokens == 2 * LONG
    three = await (await server.client("three")).begin(named(2))
    assert server.sessions.parked.tokens == 60
    assert await begun(server, named(3, of=1), second, client="two") == LONG  # into the room that it has reserved
    assert len(server.sessions.parked) == 0
    assert await begun(server, named(4, of=0), first, client="one") == 0
    await three.right_step()


@in_virtual_time(capacity=60)
async def test_a_session_begins_with_what_its_own_room_was_taken_from(server):
    """The cache has room for one session only, with what it begins with in it."""
    history = await left(server)
    assert await begun(server, named(1, of=0), history) == LONG
    assert len(server.sessions.parked) == 0


def parked(number: int, peer: str, length: int) -> tuple[SessionTerms, Any, int]:
    """What `ParkedCaches.put` takes."""
    cache = SimpleNamespace(lengths=(length,), trimmed=[], model=SimpleNamespace(has_states=False))
    cache.trim = cache.trimmed.append
    terms = SessionTerms(identity(number), peer, Span(0, 1), 1000, WireFormat.NONE)
    return terms, cache, length


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(16, 200)), max_size=12), st.integers(0, 1000), st.data())
def test_room_is_given_by_whoever_has_most(sizes: list[tuple[str, int]], free: int, data: st.DataObject) -> None:
    """Nothing more than needed goes, and no peer loses anything while another one holds more."""
    caches = ParkedCaches(lambda terms: terms.max_length)
    for number, (peer, length) in enumerate(sizes):
        caches.put(*parked(number, peer, length))
    held = Counter[str]()
    for peer, length in sizes:
        held[peer] += length
    wanted = data.draw(st.none() | st.sampled_from(range(len(sizes)))) if sizes else None
    kept = caches.find(sizes[wanted][0], identity(wanted)) if wanted is not None else None
    caches.fit(free, kept)
    assert caches.tokens <= free
    left = Counter[str]()
    for one in caches._caches.values():
        left[one.terms.peer_id] += one.tokens
        assert one.tokens == one.length >= MIN_PARKED_TOKENS
    assert left.total() == caches.tokens
    if sum(held.values()) <= free:
        assert left == held
    elif kept is None:
        assert caches.tokens > free - MIN_PARKED_TOKENS
        losers = [peer for peer in held if left[peer] < held[peer]]
        most = max(left.values(), default=0)
        assert all(held[peer] >= most for peer in losers)
    elif kept not in caches._caches.values():
        assert caches.tokens == 0
