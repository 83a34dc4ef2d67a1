"""How memory is divided among kinds of records, and among sparse layers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.memory_shares import (
    BUFFERS,
    MemoryNeed,
    NeuronNeed,
    choose_resident,
    divide_neurons,
    needed_bytes,
    share_memory,
)

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


LAYERS = st.lists(
    st.builds(NeuronNeed, st.integers(1, 150), st.sampled_from([1, 2, 5]), st.floats(0.001, 1.0)),
    min_size=1,
    max_size=4,
)


def bytes_of(slots: list[int], layers: list[NeuronNeed]) -> int:
    return sum(room * layer.stride for room, layer in zip(slots, layers, strict=True))


@example([NeuronNeed(1, 1, 1.0), NeuronNeed(1, 1, 1.0), NeuronNeed(4, 1, 1.0)], 3)
@given(LAYERS, st.integers(0, 4000))
def test_divided_memory_is_used_and_not_exceeded(layers, memory):
    slots = divide_neurons(memory, layers)
    assert all(1 <= room <= layer.count for room, layer in zip(slots, layers, strict=True))
    assert bytes_of(slots, layers) <= max(memory, bytes_of([1] * len(layers), layers))
    left = memory - bytes_of(slots, layers)
    lacks = [layer for room, layer in zip(slots, layers, strict=True) if room < layer.count]
    assert not lacks or left < sum(layer.stride for layer in layers)


@given(LAYERS)
def test_memory_for_everything_is_used_for_everything(layers):
    assert divide_neurons(sum(layer.count * layer.stride for layer in layers), layers) == [one.count for one in layers]


@pytest.mark.parametrize(
    ("memory", "needs", "expected"),
    [
        (8000, (0.1, 0.1, 0.1, 0.1), (500, 500, 500, 500)),
        (4800, (0.4, 0.1, 0.1), (800, 200, 200)),
        (7200, (0.4, 0.1, 0.1), (1000, 400, 400)),  # what the first cannot use goes to the others
        (1600, (0.3,), (400,)),
    ],
)
def test_layers_get_memory_in_proportion_to_what_two_tokens_need(memory, needs, expected):
    slots = divide_neurons(memory, [NeuronNeed(1000, 4, need) for need in needs])
    assert slots == pytest.approx(list(expected), abs=2)


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def taken(sizes: list[int], stay: tuple[bool, ...]) -> int:
    streamed = [size for size, stays in zip(sizes, stay, strict=True) if not stays]
    return sum(sizes) - sum(streamed) + BUFFERS * max(streamed, default=0)


@given(SIZES, st.integers(0, 700))
def test_the_budget_is_kept_and_refused_only_if_nothing_can_be_computed_within_it(sizes, budget):
    if budget < needed_bytes(sizes):
        with pytest.raises(NotEnoughMemory, match="of memory for weights are too little"):
            choose_resident(sizes, budget)
        return
    stay = choose_resident(sizes, budget)
    assert len(stay) == len(sizes)
    assert taken(sizes, stay) <= budget
    assert all(stay) == (sum(sizes) <= budget)


@given(st.integers(1, 40), st.integers(2, 400))
def test_equal_blocks_use_the_whole_budget_and_are_spread_evenly(count, budget):
    stay = choose_resident([10] * count, max(budget, needed_bytes([10] * count)))
    kept = sum(stay)
    if kept == count:
        return
    assert taken([10] * count, stay) + 10 > max(budget, 20), "another block would have fitted"
    if kept:
        places = [place for place, stays in enumerate(stay) if stays]
        gaps = [second - first for first, second in zip(places, [*places[1:], places[0] + count], strict=True)]
        assert max(gaps) - min(gaps) <= 1
