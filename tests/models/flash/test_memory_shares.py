"""How memory is divided among kinds of records, and among sparse layers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.memory_shares import (
    BUFFERS,
    MIN_NEURON_SHARE,
    MemoryNeed,
    NeuronNeed,
    choose_resident,
    divide_neurons,
    equal_shares,
    expected_bytes,
    needed_bytes,
    share_memory,
)
from swarm.models.flash.neurons.predictor import Sparsity
from tests.models.flash.sparsities import sparsities

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


NEEDS_OF_LAYERS = st.builds(NeuronNeed, st.integers(1, 150), st.sampled_from([1, 2, 5]), sparsities())
LAYERS = st.lists(NEEDS_OF_LAYERS, min_size=1, max_size=4)
DENSE = Sparsity(0.7, ((0.0, 0.5), (0.5, 0.2), (0.7, 0.1)))
SPARSE = Sparsity(0.06, ((0.0, 0.05), (0.05, 0.01), (0.2, 0.001), (0.5, 0.0001)))


def bytes_of(slots: list[int], layers: list[NeuronNeed]) -> int:
    return sum(room * layer.stride for room, layer in zip(slots, layers, strict=True))


ALL_NEEDED = Sparsity(1.0, ((0.0, 1.0),))


@example([NeuronNeed(1, 1, ALL_NEEDED), NeuronNeed(1, 1, ALL_NEEDED), NeuronNeed(4, 1, ALL_NEEDED)], 3)
@given(LAYERS, st.integers(0, 4000))
def test_divided_memory_is_not_exceeded_and_never_reads_more_than_equal_shares(layers, memory):
    slots = divide_neurons(memory, layers)
    assert slots == divide_neurons(memory, layers)
    assert all(1 <= room <= layer.count for room, layer in zip(slots, layers, strict=True))
    assert expected_bytes(slots, layers) <= expected_bytes(equal_shares(memory, layers), layers)
    assert bytes_of(slots, layers) <= max(memory, bytes_of([1] * len(layers), layers))
    for room, equal, layer in zip(slots, equal_shares(memory, layers), layers, strict=True):
        assert room >= min(equal, max(layer.count * MIN_NEURON_SHARE - 1, layer.count * layer.sparsity.two_tokens))


@given(LAYERS)
def test_memory_for_everything_is_used_for_everything(layers):
    assert divide_neurons(sum(layer.count * layer.stride for layer in layers), layers) == [one.count for one in layers]


@given(LAYERS, st.integers(0, 4000))
def test_no_memory_is_left_that_one_more_neuron_of_each_layer_would_fit_in(layers, memory):
    left = memory - bytes_of(divide_neurons(memory, layers), layers)
    lacks = [layer for room, layer in zip(divide_neurons(memory, layers), layers, strict=True) if room < layer.count]
    assert not lacks or left < sum(layer.stride for layer in layers)


def test_layers_that_need_many_neurons_get_more_memory():
    layers = [NeuronNeed(1000, 4, DENSE), NeuronNeed(1000, 4, SPARSE), NeuronNeed(1000, 4, SPARSE)]
    slots = divide_neurons(6000, layers)
    assert slots[0] > 1.5 * slots[1] >= 1.5 * (1000 // 16)
    assert expected_bytes(slots, layers) < 0.7 * expected_bytes(equal_shares(6000, layers), layers)


def test_layers_of_one_kind_get_equal_shares():
    slots = divide_neurons(8000, [NeuronNeed(1000, 4, SPARSE)] * 4)
    assert max(slots) - min(slots) <= 2 * 1000 / 64


def test_savings_that_come_only_with_much_memory_are_seen():
    """The second half of this layer's memory saves far more than the first."""
    steep = Sparsity(0.05, ((0.0, 0.9), (0.25, 0.89), (0.5, 0.88), (0.75, 0.01)))
    flat = Sparsity(0.3, ((0.0, 0.3), (0.25, 0.29), (0.5, 0.28), (0.75, 0.27)))
    slots = divide_neurons(1150, [NeuronNeed(1000, 1, steep), NeuronNeed(1000, 1, flat)])
    assert slots[0] >= 740


@given(sparsities(), st.integers(1, 500))
def test_one_layer_gets_all_the_memory(sparsity, memory):
    assert divide_neurons(memory, [NeuronNeed(500, 1, sparsity)]) == [memory]


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
