"""Which experts lie in which slots: any sequence of requests, against what is in the slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from swarm.errors import DriveFailed
from swarm.models.flash.experts import expert_pool
from swarm.models.flash.experts.expert_pool import ABSENT
from swarm.models.flash.stay_priority import DecayedFrequency
from tests.models.flash.experts.pools import BLOCKS, EXPERTS, pool_of, visit

forwards = st.lists(
    st.tuples(
        st.integers(0, BLOCKS - 1),
        st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS),
        st.integers(1, 5),
    ),
    max_size=25,
)


@given(forwards, st.integers(1, BLOCKS * EXPERTS + 2), st.integers(1, 4), st.booleans(), st.integers(1, 16))
def test_each_needed_expert_is_there_once_whatever_happened_before(requests, slots, group, frequency, turns):
    rule = DecayedFrequency if frequency else LeastRecentlyUsed
    pool = pool_of(slots, group, rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_pool, "TURN_SLOTS", turns)
        for block, needed, tokens in requests:
            present = pool.cache.slots_of(block, np.array(sorted(needed), dtype=np.int64)) != ABSENT
            before = pool.counters.misses
            assert sorted(visit(pool, block, list(needed), tokens)) == sorted(needed)
            assert pool.counters.misses - before == len(needed) - present.sum()
    held = np.concatenate([pool.cache.slots_of(block, np.arange(EXPERTS)) for block in range(BLOCKS)])
    held = held[held != ABSENT]
    assert len(set(held.tolist())) == len(held) <= slots


@given(forwards, st.integers(1, 12), st.data())
def test_after_a_failure_nothing_is_believed_that_was_not_read(requests, slots, data):
    pool = pool_of(slots, group=2)
    for block, needed, tokens in requests:
        store = pool.stores[block]
        store.failing = data.draw(st.booleans())
        try:
            visit(pool, block, list(needed), tokens)
        except DriveFailed:
            assert store.failing
        store.failing = False
    for block in range(BLOCKS):
        assert visit(pool, block, list(range(EXPERTS)))


@given(forwards, st.integers(1, 12), st.integers(0, 3))
def test_a_forward_may_be_given_up_in_the_middle(requests, slots, parts):
    pool = pool_of(slots)
    for block, needed, _ in requests:
        wanted = np.array(sorted(needed), dtype=np.int64)
        given_up = pool.visit(block, wanted, np.ones(len(wanted)), 1)
        for _ in zip(range(parts), given_up, strict=False):
            pass
        given_up.close()
    for block in range(BLOCKS):
        assert len(visit(pool, block, list(range(EXPERTS)))) == EXPERTS


def test_all_reads_that_have_room_begin_before_anything_is_computed():
    pool = pool_of(6)
    visit(pool, 0, [1])
    parts = pool.visit(0, np.array([0, 1, 2]), np.ones(3), 1)
    next(parts)
    slots = torch.from_numpy(pool.cache.slots_of(0, np.array([0, 2])))
    assert (pool.buffer.data[slots] == 255).all(), "on their way"
    parts.close()


def test_a_prompt_pushes_out_only_what_is_needed_less(monkeypatch):
    """The experts that every token needs stay, though a prompt goes through all the others."""
    monkeypatch.setattr(expert_pool, "TURN_SLOTS", 2)
    pool = pool_of(6)
    for _ in range(50):
        visit(pool, 0, [1, 4])
        visit(pool, 1, [2, 3])
    tokens = 20
    shares = np.full(EXPERTS, 1 / tokens)
    for part in pool.visit(2, np.arange(EXPERTS), shares, tokens):
        assert len(part)
    assert (pool.cache.slots_of(0, np.array([1, 4])) != ABSENT).all()
    assert (pool.cache.slots_of(1, np.array([2, 3])) != ABSENT).all()
