"""The pool of pages: what is held, how it grows, and that it stays consistent when memory runs out."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.attention import page_pool
from swarm.models.attention.page_pool import SCRATCH_PAGE, PageLease, PagePool

PAGE = 4


def written(layers: int = 2) -> PagePool:
    """A pool that some layers have written to."""
    pool = PagePool(PAGE)
    with torch.inference_mode():
        for number in range(layers):
            pool.layer_storage(number, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5))
    return pool


@torch.inference_mode()
def mark(pool: PagePool, page: int, value: float) -> None:
    for keys, values in pool.layers.values():
        keys[page], values[page] = value, -value


def marked(pool: PagePool, page: int) -> float:
    """What every layer holds in that page."""
    value = float(pool.layers[0][0][page, 0, 0, 0])
    for keys, values in pool.layers.values():
        assert (keys[page] == value).all()
        assert (values[page] == -value).all()
    return value


@given(st.data())
def test_whatever_is_taken_shared_and_given_back_is_counted(data):
    pool = written()
    held: list[list[int]] = []  # what each holder has
    values: dict[int, float] = {}
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("take", "share", "give back", "copy", "shrink")))
        if action == "shrink":
            pool.shrink()
        elif action == "take":
            pages = pool.allocate(data.draw(st.integers(0, 6)))
            assert not {SCRATCH_PAGE, *(page for one in held for page in one)} & set(pages), "a page was given to two"
            held.append(pages)
            for page in pages:
                mark(pool, page, number + 1.0)
                values[page] = number + 1.0
        elif held:
            holder = data.draw(st.integers(0, len(held) - 1))
            if action == "share":
                pool.retain(held[holder])
                held.append(list(held[holder]))
            elif action == "give back":
                pool.release(tuple(held.pop(holder)))
            elif held[holder]:
                source, (target,) = held[holder][0], pool.allocate(1)
                pool.copy_pages([source], [target])
                held.append([target])
                values[target] = values[source]
        everything = [page for pages in held for page in pages]
        assert pool.in_use == len(set(everything)) <= pool.page_count - 1
        for page in set(everything):
            assert pool.holder_count(page) == everything.count(page)
            assert marked(pool, page) == values[page], "growing or copying lost something"
        assert all(len(storage) >= pool.page_count for layer in pool.layers.values() for storage in layer)
    for pages in held:
        pool.release(tuple(pages))
    assert pool.in_use == 0


def test_a_pool_grows_seldom_and_little():
    pool, moves, taken = written(1), [], 0
    for _ in range(1000):
        taken += len(pool.allocate(1))
        assert pool.page_count <= 1 + max(taken + page_pool.MIN_GROWTH_PAGES, 1.25 * taken)
        moves.append(pool.relocations)
    assert len(set(moves)) < 30


def test_room_that_is_reserved_does_not_move():
    pool = written()
    pool.reserve(100 * PAGE)
    moves = pool.relocations
    pool.allocate(100)
    assert pool.relocations == moves
    pool.reserve(50 * PAGE)
    assert pool.relocations == moves


def test_memory_that_runs_out_while_the_pool_grows_leaves_it_consistent(monkeypatch):
    """Whichever storage it is that finds no memory. Both attempts fail, unless it is the last one of the first."""
    for calls in range(8):
        grow_without_memory(monkeypatch, calls)


def grow_without_memory(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    pool = written(3)
    before = pool.allocate(3)
    for page in before:
        mark(pool, page, page)
    pages, left = pool.page_count, calls
    grown = page_pool._grown

    def fails(storage: torch.Tensor, size: int) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("no memory left")
        return grown(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(page_pool, "_grown", fails)
        if calls < 6:
            with pytest.raises(torch.OutOfMemoryError):
                pool.allocate(20)
            assert (pool.page_count, pool.in_use) == (pages, 3)
            with pytest.raises(torch.OutOfMemoryError):
                pool.reserve(1000)
            assert pool.allocate(1)  # one is free still
            pool.allocate(0)
        else:
            assert len(pool.allocate(20)) == 20
    assert len(set(pool.allocate(30))) == 30
    assert [marked(pool, page) for page in before] == before
    assert all(len(storage) >= pool.page_count for layer in pool.layers.values() for storage in layer)


def test_a_pool_that_cannot_grow_by_steps_grows_by_what_is_needed(monkeypatch):
    pool = written()
    grown, sizes = page_pool._grown, []

    def fails(storage: torch.Tensor, size: int) -> torch.Tensor:
        sizes.append(size)
        if size > 3:
            raise torch.OutOfMemoryError("no memory left")
        return grown(storage, size)

    monkeypatch.setattr(page_pool, "_grown", fails)
    assert len(pool.allocate(2)) == 2
    assert sizes[0] > 3
    assert pool.page_count == 3


def test_a_lease_ends_with_its_last_reference():
    pool = written()
    one, other = PageLease(pool, (tuple(pool.allocate(2)), ())), PageLease(pool, (tuple(pool.allocate(3)),))
    assert pool.in_use == 5
    same = one
    del one, other
    assert pool.in_use == 2
    del same
    assert pool.in_use == 0


def test_pages_are_given_back_from_any_thread():
    pool = written()
    leases = [[PageLease(pool, (tuple(pool.allocate(1)),)) for _ in range(200)] for _ in range(4)]
    threads = [threading.Thread(target=own.clear) for own in leases]
    for thread in threads:
        thread.start()
    held = [PageLease(pool, (tuple(pool.allocate(1)),)) for _ in range(200)]
    for thread in threads:
        thread.join()
    assert pool.in_use == len({page for lease in held for page in lease.tables[0]}) == 200


def held(pool: PagePool) -> set[int]:
    return {page for page in range(pool.page_count) if pool.holder_count(page)} - {SCRATCH_PAGE}


def test_a_pool_that_is_mostly_empty_gives_memory_back():
    pool = written()
    pages = pool.allocate(100)
    for page in pages:
        mark(pool, page, page)
    pool.release(tuple(pages[10:]))
    large, moves = pool.page_count, pool.relocations
    pool.shrink()
    assert held(pool) == set(pages[:10])
    assert [marked(pool, page) for page in pages[:10]] == pages[:10]
    assert all(len(storage) == pool.page_count for layer in pool.layers.values() for storage in layer)
    assert pool.page_count <= large // 2
    assert pool.relocations > moves  # recorded graphs have to notice
    assert len(set(pool.allocate(50))) == 50


def test_what_was_reserved_stays():
    pool = written()
    pool.reserve(60 * PAGE)
    pool.release(tuple(pool.allocate(200)))
    pool.shrink()
    assert pool.page_count == 61
