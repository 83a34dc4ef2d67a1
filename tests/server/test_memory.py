"""The account of memory: caps, who waits for what, and who is asked to leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CacheFull, MemoryFull
from swarm.server.memory import IDLE_AFTER_S, MAX_WAITING, REQUEST_BYTES, HeldCache, MemoryPool, choose_leaving
from tests import virtual_time
from tests.async_tests import as_test

PATIENCE = 10.0


virtual = as_test(virtual_time.run)


def now() -> float:
    return asyncio.get_running_loop().time()


async def settled() -> None:
    """Whoever can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Waiters of one pool, each of a peer of its own unless said otherwise, and the order of their grants."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.granted: list[str] = []
        self.refused: list[str] = []

    def join(
        self, name: str, tokens: int, peer: str = "", patience: float = PATIENCE, weight: float = 1.0
    ) -> asyncio.Task[None]:
        async def wait() -> None:
            try:
                await self.pool.charge_or_wait(name, peer or name, tokens, patience, weight=weight)
            except CacheFull:
                self.refused.append(name)
            else:
                self.granted.append(name)

        return asyncio.create_task(wait())


def test_a_refusal_says_how_much_is_free_and_changes_nothing():
    pool = MemoryPool(100, peer_share=0.75)
    pool.charge("a", "one", 60)
    with pytest.raises(CacheFull, match=r"50 tokens .* 40 of 100 are free; this peer holds 0 of the 75"):
        pool.charge("b", "two", 50)
    with pytest.raises(CacheFull, match=r"16 tokens .* 40 of 100 are free; this peer holds 60 of the 75"):
        pool.charge("b", "one", 16)
    assert (pool.held_by("b"), pool.free) == (0, 40)
    pool.charge("b", "one", 15)
    pool.charge("c", "two", 25)
    assert pool.free == 0
    with pytest.raises(CacheFull, match="0 of 0 are free"):
        MemoryPool(0).charge("a", "peer", 1)
    with pytest.raises(MemoryFull, match=r"of memory for requests are needed and .* are free; this peer holds"):
        MemoryPool(10 << 20, 0.5, REQUEST_BYTES).charge("a", "peer", 6 << 20)


@virtual()
async def test_a_large_charge_is_not_overtaken_by_smaller_ones():
    pool = MemoryPool(100, peer_share=1.0)
    for name in ("x", "y", "z"):
        pool.charge(name, name, 30)
    line = Line(pool)
    for name, tokens in (("large", 80), ("small", 5), ("last", 5)):
        line.join(name, tokens)
        await settled()
    with pytest.raises(CacheFull, match="3 others wait"):
        await pool.charge_or_wait("impatient", "impatient", 5, 0.0)
    for name in ("x", "y"):
        pool.release(name)
        await settled()
        assert line.granted == []  # although there is room for the small one
    pool.release("z")
    await settled()
    assert line.granted == ["large", "small", "last"]


@virtual()
async def test_peers_that_hold_least_go_first():
    pool = MemoryPool(100, peer_share=1.0)
    pool.charge("all", "other", 70)
    pool.charge("mine", "rich", 30)
    line = Line(pool)
    line.join("more of the same", 60, peer="rich")
    await settled()
    line.join("first", 60, peer="poor")
    await settled()
    pool.release("all")
    await settled()
    assert line.granted == ["first"]
    pool.release("first")
    await settled()
    assert line.granted == ["first", "more of the same"]


@virtual()
async def test_points_go_first_among_those_that_hold_the_same():
    pool = MemoryPool(100, peer_share=1.0)
    pool.charge("all", "other", 56)
    for holder, amount in (("mine", 4), ("much", 40)):
        pool.charge(holder, holder, amount)
    line = Line(pool)
    for peer, weight in (("free", 1.0), ("mine", 1.0), ("points", 8.0), ("much", 8.0)):
        line.join(f"{peer} waits", 50, peer=peer, weight=weight)
        await settled()
    for released in ("all", "points waits", "free waits", "mine waits"):
        pool.release(released)
        await settled()
    assert line.granted == ["points waits", "free waits", "mine waits", "much waits"]


@pytest.mark.parametrize("patience", [0.0, PATIENCE])
@virtual()
async def test_a_peer_that_waits_for_its_own_quota_keeps_nobody_else_waiting(patience):
    """Otherwise one peer that has taken all it may have could lock all others out of the rest."""
    pool = MemoryPool(100, peer_share=0.75)
    pool.charge("a", "greedy", 75)
    line = Line(pool)
    line.join("b", 10, peer="greedy")
    await settled()
    await line.join("c", 20, peer="modest", patience=patience)
    assert (line.granted, now()) == (["c"], 0)
    pool.release("a")
    await settled()
    assert line.granted == ["c", "b"]


@virtual()
async def test_a_peer_may_have_a_bounded_number_waiting():
    pool = MemoryPool(100, 1.0)
    pool.charge("all", "other", 100)
    line = Line(pool)
    for number in range(MAX_WAITING + 5):
        line.join(f"{number}", 1, peer="flood")
    line.join("modest", 1)
    await settled()
    assert (len(line.refused), now()) == (5, 0)
    pool.release("all")
    await settled()
    assert len(line.granted) == MAX_WAITING + 1


@virtual()
async def test_only_the_next_one_has_others_make_room():
    pool = MemoryPool(100, peer_share=1.0)
    pool.charge("idle", "idle", 60)
    pool.charge("busy", "busy", 40)
    calls: list[str] = []

    def make_room(name: str) -> Callable[[], None]:
        def act() -> None:
            calls.append(name)
            if now() >= 5:
                pool.release("idle")

        return act

    first = asyncio.create_task(pool.charge_or_wait("first", "first", 60, PATIENCE, make_room("first")))
    await settled()
    with pytest.raises(CacheFull):
        await pool.charge_or_wait("behind", "behind", 60, 3.0, make_room("behind"))
    await first
    assert (now(), set(calls), pool.held_by("first")) == (5, {"first"}, 60)


@pytest.mark.parametrize("moment", ["while it waits", "as it is granted", "before it is granted"])
@virtual()
async def test_a_canceled_charge_leaves_what_was_held_before(moment):
    pool = MemoryPool(100, peer_share=1.0)
    pool.charge("all", "holder", 90)
    pool.charge("canceled", "canceled", 10)
    line = Line(pool)
    task = line.join("canceled", 60)
    await settled()
    line.join("behind", 40, peer="canceled")
    await settled()
    if moment == "as it is granted":
        pool.release("all")
        assert pool.held_by("canceled") == 70
    task.cancel()
    if moment == "before it is granted":  # the cancellation was asked for, but has not arrived
        pool.release("all")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.held_by("canceled") == 10
    pool.release("all")
    await settled()
    assert (line.granted, pool.free, now()) == (["behind"], 50, 0)


@virtual()
async def test_nobody_waits_at_a_server_that_leaves():
    pool = MemoryPool(100, peer_share=1.0)
    pool.charge("all", "holder", 80)
    line = Line(pool)
    tasks = [line.join(name, 30) for name in "abc"]
    await settled()
    pool.refuse_waiting()
    await asyncio.gather(*tasks)
    await line.join("late", 30)
    await line.join("small", 20)
    assert (line.refused, line.granted, now()) == (["a", "b", "c", "late"], ["small"], 0)


NAMES = st.sampled_from("abcdef")
ACTS = st.one_of(
    st.tuples(st.just("take"), NAMES, st.integers(1, 60)),
    st.tuples(st.just("wait"), NAMES, st.integers(1, 60)),
    st.tuples(st.just("give back"), NAMES, st.just(0)),
    st.tuples(st.just("cancel"), NAMES, st.just(0)),
    st.tuples(st.just("let pass"), NAMES, st.integers(0, 12)),
    st.tuples(st.just("let others run"), NAMES, st.integers(1, 3)),
)


@given(st.lists(ACTS, max_size=40), st.sampled_from([0.3, 0.5, 1.0]))
@settings(max_examples=200)
@virtual()
async def test_the_account_is_right_whatever_holders_do(acts, share):
    """Holders "a" to "f" belong to two peers. What each should hold is counted beside the pool."""
    pool = MemoryPool(100, share)
    expected: Counter[str] = Counter()
    numbers: Counter[str] = Counter()  # a holder that has given back is never seen again
    waits: dict[str, asyncio.Task[None]] = {}

    def holder(name):
        return f"{name}{numbers[name]}"

    def peer(one):
        return "even" if one[0] in "ace" else "odd"

    async def wait(one, tokens):
        try:
            await pool.charge_or_wait(one, peer(one), tokens, PATIENCE)
        except CacheFull:
            return
        if one == holder(one[0]):  # else it has given back what it was just granted
            expected[one] += tokens

    def forget(name):
        task = waits.pop(name, None)
        if task is not None and not task.done():
            task.cancel()

    for act, name, number in acts:
        one = holder(name)
        if act == "take":
            with suppress(CacheFull):
                pool.charge(one, peer(one), number)
                expected[one] += number
        elif act == "wait" and (name not in waits or waits[name].done()):
            waits[name] = asyncio.create_task(wait(one, number))
            await asyncio.sleep(0)
        elif act == "give back":
            pool.release(one)
            numbers[name] += 1
            waits.pop(name, None)
            del expected[one]
        elif act == "cancel":
            forget(name)
        elif act == "let pass":
            await asyncio.sleep(number)
        elif act == "let others run":
            for _ in range(number):
                await asyncio.sleep(0)
        assert 0 <= pool.free <= 100
        held = [(each, pool.held_by(each)) for each in (holder(other) for other in "abcdef")]
        assert sum(tokens for _, tokens in held) == 100 - pool.free
        for team in ("even", "odd"):
            assert sum(tokens for each, tokens in held if peer(each) == team) <= pool.quota
    await asyncio.sleep(PATIENCE + 1)
    assert all(task.done() for task in waits.values())
    assert {one: pool.held_by(one) for one in expected} == dict(expected)
    assert pool.free == 100 - expected.total()
    for name in "abcdef":
        pool.release(holder(name))
    assert pool.free == 100


KEPT = 100


def holding(*sessions: tuple[str, int, float]) -> list[HeldCache]:
    """Sessions by number: peer, tokens, seconds since they were used."""
    return [HeldCache(number, *one) for number, one in enumerate(sessions)]


def test_the_longest_idle_session_leaves_first_and_no_more_than_have_to():
    held = holding(("a", 40, 90), ("b", 40, 300), ("c", 40, 100), ("d", 40, 10))
    assert choose_leaving(held, "me", 30, 30, KEPT) == [1]
    assert choose_leaving(held, "me", 41, 41, KEPT) == [1, 2]
    assert choose_leaving(held, "me", 120, 120, KEPT) == [1, 2, 0]
    assert choose_leaving(held, "me", 121, 121, KEPT) == []  # it would not be enough
    assert choose_leaving(held, "me", 0, 30, KEPT) == []


def test_what_is_on_loan_is_given_back_to_those_within_their_share():
    held = holding(("a", 60, 3), ("a", 60, 2), ("a", 60, 1), ("b", KEPT, 0))
    assert choose_leaving(held, "me", 50, KEPT, KEPT) == [0]
    assert choose_leaving(held, "me", 100, KEPT, KEPT) == [0, 1]
    assert choose_leaving(held, "me", 121, KEPT, KEPT) == []  # 60 are its share
    assert choose_leaving(held, "me", 50, KEPT + 1, KEPT) == []
    assert choose_leaving(held, "a", 50, KEPT, KEPT) == []


PEERS = st.sampled_from("abcd")
HELD = st.lists(st.tuples(PEERS, st.integers(0, 150), st.floats(0, 200)), max_size=8)


@given(HELD, PEERS, st.integers(0, 300), st.integers(0, 300))
def test_whoever_leaves_has_a_reason_to_and_makes_enough_room(sessions, peer, needed, wanted):
    held = holding(*sessions)
    leaving = choose_leaving(held, peer, needed, wanted, KEPT)
    assert len(set(leaving)) == len(leaving)
    if not leaving:
        return
    freed = [held[number] for number in leaving]
    assert sum(one.tokens for one in freed) >= needed > sum(one.tokens for one in freed[:-1])
    totals = Counter()
    for one in held:
        totals[one.peer] += one.tokens
    for one in freed:
        assert one.idle_s > IDLE_AFTER_S or (wanted <= KEPT < totals[one.peer] and one.peer != peer)
        totals[one.peer] -= one.tokens


@given(HELD, st.integers(1, 300), st.integers(0, KEPT))
def test_equals_never_push_each_other_out_in_turn(sessions, needed, wanted):
    """A peer that was asked to leave and comes back at once cannot have a session leave that is in use."""
    held = [HeldCache(one.session, one.peer, one.tokens, min(one.idle_s, IDLE_AFTER_S)) for one in holding(*sessions)]
    leaving = [held[number] for number in choose_leaving(held, "newcomer", needed, wanted, KEPT)]
    left = [one for one in held if one not in leaving]
    after = [*left, HeldCache("new", "newcomer", wanted, 0.0)]
    for one in leaving:
        again = one.tokens + sum(other.tokens for other in left if other.peer == one.peer)
        assert "new" not in choose_leaving(after, one.peer, one.tokens, again, KEPT)
