"""How memory is divided among kinds of records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory
from swarm.models.flash.memory_shares import MemoryNeed, share_memory
from swarm.models.flash.plans.block_plan import RecordKind

NEEDS = st.dictionaries(
    st.sampled_from(RecordKind),
    st.tuples(st.integers(0, 100), st.integers(0, 1000)).map(lambda pair: MemoryNeed(pair[0], sum(pair))),
    min_size=1,
)


@given(NEEDS, st.integers(0, 4000))
def test_each_kind_gets_what_it_needs_and_none_gets_more_than_it_can_use(needs, memory):
    least = sum(need.least for need in needs.values())
    if memory < least:
        with pytest.raises(NotEnoughMemory, match="allow more memory"):
            share_memory(memory, needs)
        return
    shares = share_memory(memory, needs)
    assert shares.keys() == needs.keys()
    assert all(needs[kind].least <= share <= needs[kind].whole for kind, share in shares.items())
    total = sum(need.whole for need in needs.values())
    # Rounding may leave a byte for each kind.
    assert min(memory, total) - len(needs) <= sum(shares.values()) <= min(memory, total)


@given(NEEDS, st.integers(0, 4000))
def test_streamed_blocks_come_first(needs, memory):
    needs = {**needs, RecordKind.BLOCK: MemoryNeed(10, 500)}
    others = sum(need.least for kind, need in needs.items() if kind is not RecordKind.BLOCK)
    if memory >= others + 10:
        assert share_memory(memory, needs)[RecordKind.BLOCK] == min(500, memory - others)
