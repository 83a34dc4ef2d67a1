"""How much the page cache is expected to serve."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.reading.page_cache import COUNTED_SHARE, page_cache_share

sizes = st.integers(0, 2**45)


@given(sizes, sizes, st.integers(-(2**45), 2**45), st.booleans())
def test_it_is_a_share_and_grows_with_the_room(files, held, room, in_order):
    share = page_cache_share(files, held, room, in_order)
    assert 0 <= share <= 1
    assert share <= page_cache_share(files, held, room + 2**20, in_order)
    if room <= 0 or held >= files:
        assert share == 0
    elif room * COUNTED_SHARE >= files:
        assert share == 1


def served(records: int, held: int, cached: int, skew: float) -> float:
    """Play random reads: the share of what a server with `held` records reads that the page cache has."""
    chosen = random.Random(0)
    weights = [(record + 1) ** -skew for record in range(records)]
    pool: OrderedDict[int, None] = OrderedDict()
    cache: OrderedDict[int, None] = OrderedDict()
    hits = reads = 0
    for record in chosen.choices(range(records), weights, k=8000):
        if record not in pool:
            reads += 1
            hits += record in cache
            used(cache, record, cached)
        used(pool, record, held)
    return hits / reads


def used(recent: OrderedDict[int, None], record: int, room: int) -> None:
    recent[record] = None
    recent.move_to_end(record)
    if len(recent) > room:
        recent.popitem(last=False)


@pytest.mark.parametrize("held", [20, 50, 100])
@pytest.mark.parametrize("cached", [20, 50, 100, 150])
def test_it_is_what_a_cache_of_what_was_read_last_serves(held, cached):
    """Or a little less; and less still than if some records are needed more often than others."""
    expected = page_cache_share(200, held, int(cached / COUNTED_SHARE), in_order=False)
    assert -0.05 < served(200, held, cached, skew=0) - expected < 0.2
    assert served(200, held, cached, skew=0.7) > expected - 0.05


def test_streamed_blocks_come_from_a_page_cache_with_room_for_all_of_them():
    assert page_cache_share(100, 40, 119, in_order=True) == 0
    assert page_cache_share(100, 40, 120, in_order=True) == 1
