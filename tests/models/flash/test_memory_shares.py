"""How memory is divided among kinds of records, and among sparse layers."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory
from swarm.models.flash.memory_shares import (
    MIN_NEURON_SHARE,
    MemoryNeed,
    NeuronNeed,
    divide_neurons,
    equal_shares,
    expected_bytes,
    share_memory,
)
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.flash.sparsity import Sparsity
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
DENSE, SPARSE = Sparsity((0.5, 0.7, 0.8)), Sparsity((0.05, 0.06, 0.065))


def bytes_of(slots: list[int], layers: list[NeuronNeed]) -> int:
    return sum(room * layer.stride for room, layer in zip(slots, layers, strict=True))


ALL_NEEDED = Sparsity((1.0,))


@example([NeuronNeed(1, 1, ALL_NEEDED), NeuronNeed(1, 1, ALL_NEEDED), NeuronNeed(4, 1, ALL_NEEDED)], 3)
@given(LAYERS, st.integers(0, 4000))
def test_divided_memory_is_not_exceeded_and_never_reads_more_than_equal_shares(layers, memory):
    slots = divide_neurons(memory, layers)
    assert slots == divide_neurons(memory, layers)
    assert all(1 <= room <= layer.count for room, layer in zip(slots, layers, strict=True))
    assert expected_bytes(slots, layers) <= expected_bytes(equal_shares(memory, layers), layers)
    assert bytes_of(slots, layers) <= max(memory, bytes_of([1] * len(layers), layers))
    for room, equal, layer in zip(slots, equal_shares(memory, layers), layers, strict=True):
        assert room >= min(equal, max(layer.count * MIN_NEURON_SHARE - 1, layer.count * layer.sparsity.needed(2)))


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
    steep = Sparsity((0.9,), reads={1: ((0.25, 0.89), (0.5, 0.88), (0.75, 0.01))})
    flat = Sparsity((0.3, 0.3), reads={1: ((0.25, 0.29), (0.5, 0.28), (0.75, 0.27))})
    slots = divide_neurons(1150, [NeuronNeed(1000, 1, steep), NeuronNeed(1000, 1, flat)])
    assert slots[0] >= 740


@given(sparsities(), st.integers(1, 500))
def test_one_layer_gets_all_the_memory(sparsity, memory):
    assert divide_neurons(memory, [NeuronNeed(500, 1, sparsity)]) == [memory]
