from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CacheFull, MemoryFull
from swarm.server.memory.pool import MAX_PEER_CACHE_SHARE, MAX_WAITING, REQUEST_BYTES, MemoryPool
from tests import virtual_time

PATIENCE = 10.0


def on_virtual_time(scenario: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(scenario)


def now() -> float:
    return asyncio.get_running_loop().time()


async def settled() -> None:
    """Whoever can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)


class Line:
    """Waiters of one accountant, each of a peer of its own unless said otherwise, and the order of their grants."""

    def __init__(self, accountant: MemoryPool) -> None:
        self.accountant = accountant
        self.granted: list[str] = []
        self.refused: list[str] = []

    def join(self, name: str, tokens: int, peer: str = "", patience: float = PATIENCE) -> asyncio.Task[None]:
        async def wait() -> None:
            try:
                await self.accountant.allocate_or_wait(name, peer or name, tokens, patience)
            except CacheFull:
                self.refused.append(name)
            else:
                self.granted.append(name)

        return asyncio.create_task(wait())


def test_what_is_granted_is_held_until_it_is_given_back():
    books = MemoryPool(100, peer_share=1.0)
    books.allocate("a", "peer", 30)
    books.allocate("a", "peer", 20)
    books.allocate("b", "peer", 50)
    assert (books.held_by("a"), books.held_by("b"), books.free) == (50, 50, 0)
    books.release("a")
    books.release("a")
    books.release("nobody")
    assert (books.held_by("a"), books.held_by("b"), books.free) == (0, 50, 50)


def test_a_refusal_says_how_much_is_free_and_changes_nothing():
    books = MemoryPool(100, peer_share=0.75)
    books.allocate("a", "one", 60)
    with pytest.raises(CacheFull, match=r"50 tokens .* 40 of 100 are free; this peer holds 0 of the 75"):
        books.allocate("b", "two", 50)
    with pytest.raises(CacheFull, match=r"16 tokens .* 40 of 100 are free; this peer holds 60 of the 75"):
        books.allocate("b", "one", 16)
    assert (books.held_by("b"), books.free) == (0, 40)
    books.allocate("b", "one", 15)
    books.allocate("c", "two", 25)
    assert books.free == 0


def test_without_any_room_nobody_gets_any():
    books = MemoryPool(0)
    with pytest.raises(CacheFull, match="0 of 0 are free"):
        books.allocate("a", "peer", 1)


def test_a_peer_leaves_room_for_others_by_default():
    books = MemoryPool(1000)
    with pytest.raises(CacheFull):
        books.allocate("a", "greedy", int(1000 * MAX_PEER_CACHE_SHARE) + 1)
    books.allocate("a", "greedy", int(1000 * MAX_PEER_CACHE_SHARE))
    books.allocate("b", "modest", int(1000 * (1 - MAX_PEER_CACHE_SHARE)))


def test_who_comes_first_is_served_first():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 100)
        line = Line(books)
        for name in "abc":
            line.join(name, 30)
            await settled()
        books.release("all")
        await settled()
        assert line.granted == ["a", "b", "c"]
        assert (now(), books.free) == (0, 10)

    on_virtual_time(scenario)


def test_a_large_request_is_not_overtaken_by_smaller_ones():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        for name in ("x", "y", "z"):
            books.allocate(name, name, 30)
        line = Line(books)
        line.join("large", 80)
        await settled()
        line.join("small", 5)
        await settled()
        with pytest.raises(CacheFull, match="2 others wait"):
            books.allocate("impatient", "impatient", 5)
        for name in ("x", "y"):
            books.release(name)
            await settled()
            assert line.granted == []  # although there is room for the small one
        books.release("z")
        await settled()
        assert line.granted == ["large", "small"]

    on_virtual_time(scenario)


def test_peers_that_hold_least_go_first():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "other", 70)
        books.allocate("mine", "rich", 30)
        line = Line(books)
        line.join("more of the same", 60, peer="rich")
        await settled()
        line.join("first", 60, peer="poor")
        await settled()
        books.release("all")
        await settled()
        assert line.granted == ["first"]
        books.release("first")
        await settled()
        assert line.granted == ["first", "more of the same"]

    on_virtual_time(scenario)


@pytest.mark.parametrize("patience", [0.0, PATIENCE])
def test_who_waits_for_its_own_quota_keeps_nobody_else_waiting(patience):
    """Else one peer that has taken all it may have could lock all others out of the rest."""

    async def scenario():
        books = MemoryPool(100, peer_share=0.75)
        books.allocate("a", "greedy", 75)
        line = Line(books)
        line.join("b", 10, peer="greedy")
        await settled()
        await line.join("c", 20, peer="modest", patience=patience)
        assert (line.granted, now()) == (["c"], 0)
        books.release("a")
        await settled()
        assert line.granted == ["c", "b"]

    on_virtual_time(scenario)


def test_who_holds_less_than_those_who_wait_need_not_wait_behind_them():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("a", "rich", 40)
        line = Line(books)
        line.join("b", 60 + 1, peer="rich")  # never, as long as a holds what it has
        line.join("c", 60, peer="rich")
        await settled()
        assert line.granted == ["c"]
        books.release("c")
        line.join("d", 60, peer="rich")
        books.allocate("newcomer", "poor", 30)
        await settled()
        assert books.held_by("newcomer") == 30

    on_virtual_time(scenario)


def test_patience_ends():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 80)
        line = Line(books)
        first = line.join("first", 50)
        await settled()
        second = line.join("second", 15, patience=PATIENCE * 3)
        await first
        assert (line.refused, now()) == (["first"], PATIENCE)
        await second  # which only waited for those before it
        assert (line.granted, now(), books.free) == (["second"], PATIENCE, 5)

    on_virtual_time(scenario)


@pytest.mark.parametrize("granted", [False, True], ids=["while it waits", "as it is granted"])
def test_who_is_cancelled_holds_nothing(granted):
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 100)
        books.allocate("cancelled", "cancelled", 0)
        line = Line(books)
        task = line.join("cancelled", 70)
        await settled()
        line.join("behind", 60)
        await settled()
        if granted:
            books.release("all")
            assert books.held_by("cancelled") == 70
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert books.held_by("cancelled") == 0
        if not granted:
            books.release("all")
        await settled()
        assert (line.granted, books.free, now()) == (["behind"], 40, 0)

    on_virtual_time(scenario)


def test_who_is_granted_once_its_task_is_cancelled_holds_nothing():
    """The cancellation has been asked for, but has not arrived, when the room becomes free."""

    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 100)
        line = Line(books)
        task = line.join("cancelled", 70)
        await settled()
        task.cancel()
        books.release("all")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (books.held_by("cancelled"), books.free) == (0, 100)

    on_virtual_time(scenario)


def test_a_wait_in_addition_to_what_is_held_gives_back_only_itself():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("mine", "peer", 20)
        books.allocate("other", "other", 80)
        task = Line(books).join("mine", 50, peer="peer")
        await settled()
        books.release("other")
        assert books.held_by("mine") == 70
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert (books.held_by("mine"), books.free) == (20, 80)

    on_virtual_time(scenario)


def test_who_gives_back_waits_no_more():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 80)
        books.allocate("mine", "mine", 10)
        line = Line(books)
        task = line.join("mine", 60)
        await settled()
        books.release("mine")
        await task
        assert (line.refused, now(), books.free) == (["mine"], 0, 20)
        books.release("all")
        assert books.free == 100

    on_virtual_time(scenario)


def test_closed_books_let_nobody_wait():
    async def scenario():
        books = MemoryPool(100, peer_share=1.0)
        books.allocate("all", "holder", 80)
        line = Line(books)
        tasks = [line.join(name, 30) for name in "abc"]
        await settled()
        books.refuse_waiting()
        await asyncio.gather(*tasks)
        await line.join("late", 30)
        await line.join("small", 20)
        assert (line.refused, line.granted, now()) == (["a", "b", "c", "late"], ["small"], 0)

    on_virtual_time(scenario)


NAMES = st.sampled_from("abcdef")
ACTS = st.one_of(
    st.tuples(st.just("take"), NAMES, st.integers(1, 60)),
    st.tuples(st.just("wait"), NAMES, st.integers(1, 60)),
    st.tuples(st.just("give back"), NAMES, st.just(0)),
    st.tuples(st.just("cancel"), NAMES, st.just(0)),
    st.tuples(st.just("let pass"), NAMES, st.integers(0, 12)),
    st.tuples(st.just("let others run"), NAMES, st.integers(1, 3)),
)


@given(st.lists(ACTS, max_size=40), st.sampled_from([0.3, 0.5, 1.0]), st.sampled_from([0.4, 1.0]))
@settings(max_examples=200)
def test_the_books_are_right_whatever_holders_do(acts, share, new_share):
    """Holders "a" to "f" belong to two peers, one of them new. What each should hold is counted beside the books."""

    async def scenario():
        books = MemoryPool(100, share, standing=lambda peer: float(peer == "even"), new_peers_share=new_share)
        expected: Counter[str] = Counter()
        numbers: Counter[str] = Counter()  # a holder that has given back is never seen again
        waits: dict[str, asyncio.Task[None]] = {}

        def holder(name):
            return f"{name}{numbers[name]}"

        def peer(one):
            return "even" if one[0] in "ace" else "odd"

        async def wait(one, tokens):
            try:
                await books.allocate_or_wait(one, peer(one), tokens, PATIENCE)
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
                    books.allocate(one, peer(one), number)
                    expected[one] += number
            elif act == "wait" and (name not in waits or waits[name].done()):
                waits[name] = asyncio.create_task(wait(one, number))
                await asyncio.sleep(0)
            elif act == "give back":
                books.release(one)
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
            assert 0 <= books.free <= 100
            held = [(each, books.held_by(each)) for each in (holder(other) for other in "abcdef")]
            assert sum(tokens for _, tokens in held) == 100 - books.free
            for team in ("even", "odd"):
                assert sum(tokens for each, tokens in held if peer(each) == team) <= books.quota
            assert sum(tokens for each, tokens in held if peer(each) == "odd") <= 100 * new_share
        await asyncio.sleep(PATIENCE + 1)
        assert all(task.done() for task in waits.values())
        assert {one: books.held_by(one) for one in expected} == dict(expected)
        assert books.free == 100 - expected.total()
        for name in "abcdef":
            books.release(holder(name))
        assert books.free == 100

    on_virtual_time(scenario)


def test_new_peers_together_leave_room_for_those_of_standing():
    books = MemoryPool(100, 0.5, standing=lambda peer: float(peer == "old"), new_peers_share=0.75)
    books.allocate("a", "new", 50)
    with pytest.raises(CacheFull):
        books.allocate("b", "newer", 26)
    books.allocate("b", "newer", 25)
    with pytest.raises(CacheFull):
        books.allocate("c", "newest", 1)
    books.allocate("d", "old", 25)
    assert books.free == 0
    books.release("d")
    books.release("a")
    books.allocate("d", "old", 50)
    books.allocate("c", "newest", 25)  # what those of standing hold counts for nobody else
    assert books.free == 0


def test_a_new_peer_waits_for_its_share_and_keeps_nobody_of_standing_waiting():
    async def scenario():
        books = MemoryPool(100, 1.0, standing=lambda peer: float(peer == "old"), new_peers_share=0.5)
        books.allocate("a", "new", 50)
        line = Line(books)
        line.join("b", 10, peer="newer")
        await settled()
        line.join("c", 50, peer="old")
        await settled()
        assert line.granted == ["c"]
        books.release("a")
        await settled()
        assert line.granted == ["c", "b"]

    on_virtual_time(scenario)


def test_standing_counts_in_the_queue():
    """Whoever holds more, but has earned more, goes first."""

    async def scenario():
        books = MemoryPool(100, 1.0, standing=lambda peer: float(peer == "old"))
        books.allocate("a", "old", 50)
        books.allocate("b", "new", 10)
        books.allocate("c", "other", 40)
        line = Line(books)
        line.join("second", 30, peer="new")
        await settled()
        line.join("first", 30, peer="old")
        await settled()
        books.release("c")
        await settled()
        assert line.granted == ["first"]

    on_virtual_time(scenario)


def test_refusals_of_bytes_say_how_many():
    books = MemoryPool(10 << 20, 0.5, REQUEST_BYTES)
    with pytest.raises(MemoryFull, match=r"of memory for requests are needed and .* are free; this peer holds"):
        books.allocate("a", "peer", 6 << 20)


def test_a_peer_may_have_a_bounded_number_waiting():
    async def scenario():
        books = MemoryPool(100, 1.0)
        books.allocate("all", "other", 100)
        line = Line(books)
        for number in range(MAX_WAITING + 5):
            line.join(f"{number}", 1, peer="flood")
        line.join("modest", 1)
        await settled()
        assert (len(line.refused), now()) == (5, 0)
        books.release("all")
        await settled()
        assert len(line.granted) == MAX_WAITING + 1

    on_virtual_time(scenario)
