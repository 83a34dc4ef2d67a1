"""The padded keys and values against a plain concatenation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.models.attention.padded_kv import PaddedKV, PaddedKVLayer, PaddedSlice

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5  # some families' keys and values have different widths


def states(rows: int, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, HEADS, slots, KEY_DIM, generator=generator)
    return keys, torch.randn(rows, HEADS, slots, VALUE_DIM, generator=generator)


def filled(rows: int, slots: int, layers: int = 2, seed: int = 0) -> tuple[PaddedKV, list]:
    """A cache after one step, and the keys and values that each layer was given."""
    cache = PaddedKV(layers)
    given_states = [states(rows, slots, seed + layer) for layer in range(layers)]
    for layer, (keys, values) in enumerate(given_states):
        cache.update(keys, values, layer)
    cache.length = slots
    return cache, given_states


def test_appending_within_the_capacity_does_not_move_the_past():
    layer = PaddedKVLayer()
    layer.update(*states(rows=1, slots=3))
    storage = layer.keys.data_ptr()
    layer.update(*states(rows=1, slots=3))
    assert layer.keys.data_ptr() == storage


def test_mask_covers_the_past_and_the_new_tokens():
    layer = PaddedKVLayer(length=5)
    assert layer.get_mask_sizes(3) == (8, 0)


def test_rollback_repairs_layers_that_a_failed_forward_left_behind():
    cache, _ = filled(rows=1, slots=3)
    cache.update(*states(rows=1, slots=2), 0)  # the forward failed before layer 1
    cache.truncate(3)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]


def test_a_cache_of_later_layers_answers_for_layer_0():
    cache = PaddedKV(end=3, first=2)
    assert cache.sequences == 0
    cache.update(*states(rows=4, slots=5), 2)
    assert cache.get_seq_length() == 5
    assert cache.sequences == 4


@pytest.mark.parametrize("first", [0, 2])
def test_assemble_keeps_the_numbers_of_the_layers(first):
    cache = PaddedKV(end=3, first=first)
    for layer in range(first, 3):
        cache.update(*states(rows=1, slots=4, seed=layer), layer)
    again = PaddedKV.from_slices([PaddedSlice(cache, 0, 0, 4)])
    assert again.first == first
    for old, new in zip(cache.layers, again.layers, strict=True):
        assert torch.equal(old.keys[:, :, :4], new.keys[:, :, :4])


@st.composite
def pieces(draw) -> list[tuple[int, int, int, int]]:
    """(cache, row, pad, length) of sequences to put together; the caches have 2 sequences of 5, 70 and 9 slots."""
    chosen = []
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(0, 2))
        slots = (5, 70, 9)[number]
        pad = draw(st.integers(0, slots))
        chosen.append((number, draw(st.integers(0, 1)), pad, draw(st.integers(0, slots - pad))))
    if draw(st.booleans()):  # a reordering of one rectangle
        number, _, pad, length = chosen[0]
        chosen = [(number, draw(st.integers(0, 1)), pad, length) for _ in chosen]
    return chosen


@given(pieces(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_assemble_and_append_equal_a_concatenation(chosen, new):
    sources = [filled(rows=2, slots=slots, seed=seed) for seed, slots in ((10, 5), (20, 70), (30, 9))]
    cache = PaddedKV.from_slices([PaddedSlice(sources[number][0], *rest) for number, *rest in chosen])
    assert cache.length == max(length for *_, length in chosen)
    for layer in range(2):
        more = states(len(chosen), new, seed=40 + layer)
        for result, kind in zip(cache.update(*more, layer), (0, 1), strict=True):
            for place, (number, row, pad, length) in enumerate(chosen):
                past = sources[number][1][layer][kind][row, :, pad : pad + length]
                expected = torch.cat([past, more[kind][place]], dim=1)
                assert torch.equal(result[place, :, cache.length - length :], expected)
