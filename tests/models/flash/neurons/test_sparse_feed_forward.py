from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.flash.memory_store import MemoryStore
from swarm.errors import DriveFailed, RequestRefused
from swarm.models.flash.neurons.active_window import ForwardTokens
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward
from swarm.models.flash.neurons.sparse_feed_forward import NOTED_SHARE, NOTED_TOKENS, SparseOptions
from swarm.models.flash.records import Indices, PendingRead, RecordBuffer
from tests.models.flash.neurons.layers import (
    HIDDEN,
    NEURONS,
    Case,
    FeedForward,
    SeededPredictor,
    expected_with,
    make_case,
    relu2,
    store_for,
)

SHAPES = {
    "relu": (False, nn.ReLU(), True),
    "squared relu": (False, relu2(), False),
    "gated relu": (True, nn.ReLU(), False),
    "gated relu with biases": (True, nn.ReLU(), True),
}


def case_of(shape: str, capacity: int, share: float = 0.3) -> Case:
    torch.manual_seed(0)
    dense = FeedForward(*SHAPES[shape])
    return make_case(dense, SeededPredictor(share), SparseOptions(capacity))


def tokens_of(case: Case, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(count, HIDDEN)
    return hidden, case.sparse._predictor.select(hidden)


@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_compute_their_own_selected_neurons_whatever_is_in_memory(shape: str) -> None:
    capacity = {"relu": NEURONS, "squared relu": 3}.get(shape, 20)
    case = case_of(shape, capacity)
    for count in (1, 1, 5, 1, 17):
        hidden, selected = tokens_of(case, count)
        torch.testing.assert_close(case.module(hidden), expected_with(case.dense, hidden, selected))
    assert case.sparse.matrix.num_used <= capacity


@pytest.mark.parametrize(("gated", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_results_have_the_same_bits_whatever_was_in_memory(gated: bool, dtype: torch.dtype) -> None:
    """Neurons are computed in two products, one before the others have arrived, and added up in their own order."""
    torch.manual_seed(0)
    dense = FeedForward(gated, nn.ReLU(), True).to(dtype)
    hidden = torch.randn(5, HIDDEN).to(dtype)
    results = []
    for others in range(6):
        case = make_case(dense, SeededPredictor(0.4), SparseOptions(34))
        for _ in range(others):
            case.module(torch.randn(1, HIDDEN).to(dtype))
        results.append(case.module(hidden[:1]))
    assert case.sparse.counters.portions == case.sparse.counters.forwards
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", SHAPES)
def test_many_tokens_are_computed_with_all_neurons(shape: str) -> None:
    case = case_of(shape, capacity=10)
    hidden, _ = tokens_of(case, 33)
    torch.testing.assert_close(case.module(hidden), case.dense(hidden))
    assert case.store.counters.records == NEURONS  # each once, also those that stay in memory afterwards


def test_a_span_can_be_told_to_compute_everything_exactly() -> None:
    case = case_of("gated relu", capacity=10)
    hidden, selected = tokens_of(case, 2)
    case.sparse._shared.exactly = True
    torch.testing.assert_close(case.module(hidden), case.dense(hidden))
    case.sparse._shared.exactly = False
    torch.testing.assert_close(case.module(hidden), expected_with(case.dense, hidden, selected))


def test_what_is_in_memory_is_not_read_again() -> None:
    case = case_of("relu", capacity=NEURONS)
    hidden, selected = tokens_of(case, 2)
    case.module(hidden[:1])
    assert case.store.counters.records == int(selected[0].sum())
    case.module(hidden[:1])
    assert case.store.counters.records == int(selected[0].sum())
    case.module(hidden[1:])
    assert case.store.counters.records == int(selected.any(0).sum())
    assert case.sparse.counters.read == case.store.counters.records
    assert case.sparse.counters.selected == int(2 * selected[0].sum() + selected[1].sum())


@pytest.mark.parametrize(("count", "noted"), [(40, int(40 * NOTED_SHARE)), (300, NOTED_TOKENS)])
def test_after_a_prompt_the_neurons_of_its_last_tokens_are_in_memory(count: int, noted: int) -> None:
    case = case_of("gated relu", capacity=NEURONS, share=0.02)
    prompt, selected = tokens_of(case, count)
    case.module(prompt)
    last = selected[-noted:].any(0)
    assert set(case.sparse.matrix.neurons.tolist()) == set(last.nonzero()[:, 0].tolist())
    read = case.store.counters.records
    torch.testing.assert_close(case.module(prompt[-1:]), expected_with(case.dense, prompt[-1:], selected[-1:]))
    assert case.store.counters.records == read


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 4), (torch.bfloat16, 40), (torch.float16, 1)])
def test_16_bit_weights(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    dense = FeedForward(True, nn.ReLU(), True).to(dtype)
    case = make_case(dense, SeededPredictor(1.1), SparseOptions(NEURONS))
    hidden = torch.randn(count, HIDDEN, dtype=dtype)
    torch.testing.assert_close(case.module(hidden), dense(hidden), rtol=3e-2, atol=1e-2)


class PlantedPredictor:
    """Selects the neurons of a list, whose number is the token's first value."""

    memory_bytes = 0

    def __init__(self, *lists: range) -> None:
        self.lists = lists

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        selected = torch.zeros(len(hidden_TH), NEURONS, dtype=torch.bool)
        for token, number in enumerate(hidden_TH[:, 0].int().tolist()):
            selected[token, list(self.lists[number])] = True
        return selected


def test_neurons_of_later_candidates_make_room_before_those_of_accepted_ones() -> None:
    predictor = PlantedPredictor(range(0, 4), range(2, 6), range(10, 14), range(12, 16), range(20, 26))
    tokens = ForwardTokens((4,), accepted=0.5)
    case = make_case(FeedForward(False, nn.ReLU(), False), predictor, SparseOptions(capacity=12), tokens=tokens)
    hidden = torch.randn(5, HIDDEN)
    hidden[:, 0] = torch.arange(5)
    case.module(hidden[:4])
    tokens.counts = None
    case.module(hidden[4:])
    assert set(case.sparse.matrix.neurons.tolist()) == {*range(6), *range(20, 26)}


def test_gradients_are_refused() -> None:
    case = case_of("relu", capacity=5)
    with pytest.raises(RequestRefused, match="no gradients"):
        case.module(torch.randn(1, HIDDEN, requires_grad=True))


class FailingStore(MemoryStore):
    """Fails where it is told to."""

    fails: Iterator[bool] = iter(())

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        if next(self.fails, False):
            buffer.data[torch.from_numpy(slots)] = 255  # torn: NaN

            class Failed:
                def wait(self) -> None:
                    raise DriveFailed("the drive is gone")

            return Failed()
        return super().read(records, buffer, slots)


@pytest.mark.parametrize(("count", "before"), [(1, 0), (1, 2), (40, 0), (40, 1)])
def test_after_a_read_that_failed_the_next_forward_is_right(count: int, before: int) -> None:
    torch.manual_seed(0)
    dense = FeedForward(False, nn.ReLU(), True)
    plan = find_sparse_feed_forward(dense)
    assert plan is not None
    layout = store_for(dense, plan).layout
    store = FailingStore(layout, {name: dense.state_dict()[name] for name in plan.axes})
    case = make_case(dense, SeededPredictor(0.3), SparseOptions(20), store=store)
    hidden, selected = tokens_of(case, count)
    store.fails = iter([False] * before + [True])
    hidden, selected = tokens_of(case, count)
    while True:
        try:
            case.module(hidden)
        except DriveFailed:
            break
        hidden, selected = tokens_of(case, count)
    expected = expected_with(dense, hidden, selected) if count == 1 else dense(hidden)
    torch.testing.assert_close(case.module(hidden), expected)
    assert np.all(case.sparse.matrix.row_of[case.sparse.matrix.neurons] == np.arange(case.sparse.matrix.num_used))
