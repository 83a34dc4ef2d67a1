from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward
from swarm.models.flash.neurons.predictor_training import (
    DenseFeedForward,
    TrainingOptions,
    balanced_loss,
    cheapest_rank,
    energy,
    make_predictor,
    needed_by_two_tokens,
    svd_predictor,
    threshold_for,
)
from tests.models.flash.neurons.layers import HIDDEN, NEURONS, FeedForward, relu2


def layer_of(module: FeedForward) -> DenseFeedForward:
    plan = find_sparse_feed_forward(module)
    assert plan is not None
    return DenseFeedForward(module, plan)


def inputs_of(count: int, seed: int = 0) -> torch.Tensor:
    """Correlated, as hidden states are: most of their variance lies in a few directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99)) * 0.7 ** torch.arange(HIDDEN)
    return torch.randn(count, HIDDEN, generator=generator) @ mixing.T


@pytest.mark.parametrize("gated", [False, True])
def test_contributions_are_the_lengths_of_what_neurons_add(gated: bool) -> None:
    torch.manual_seed(0)
    module = FeedForward(gated, relu2(), True)
    hidden = inputs_of(4)
    values = module.values(hidden)
    added = values[:, :, None] * module.down.weight.T  # [tokens, neurons, hidden]
    torch.testing.assert_close(layer_of(module).contributions(hidden), added.norm(dim=2).detach())


@pytest.mark.parametrize("gated", [False, True])
def test_at_full_rank_the_untrained_predictor_computes_the_entrys_product(gated: bool) -> None:
    torch.manual_seed(0)
    module = FeedForward(gated, nn.ReLU(), True)
    entry = module.gate if gated else module.up
    hidden = inputs_of(50)
    for inputs in (None, hidden):
        predictor = svd_predictor(layer_of(module), HIDDEN, inputs)
        torch.testing.assert_close(predictor.scores(hidden), entry(hidden).detach(), rtol=1e-3, atol=1e-3)


@given(st.integers(0, 1000), st.floats(0.01, 0.999))
def test_the_threshold_reaches_the_recall_with_as_few_neurons_as_possible(seed: int, recall: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 9, generator=generator)
    contributions = torch.relu(torch.randn(6, 9, generator=generator))
    contributions[0, 0] = 1.0
    threshold = threshold_for(scores, contributions, recall)
    selected = scores > threshold
    total = energy(contributions).sum()
    assert energy(contributions)[selected].sum() >= (recall - 1e-5) * total
    lowest = scores[selected].min()
    fewer = scores > lowest
    assert energy(contributions)[fewer].sum() < recall * total * (1 + 1e-5)


def test_the_loss_weighs_active_and_inactive_neurons_equally_and_large_contributions_more() -> None:
    contributions = torch.tensor([[4.0, 0.0, 0.0, 0.0, 0.0]])
    wrong_active = balanced_loss(torch.tensor([[-3.0, -3.0, -3.0, -3.0, -3.0]]), contributions)
    wrong_inactive = balanced_loss(torch.tensor([[3.0, 3.0, 3.0, 3.0, 3.0]]), contributions)
    torch.testing.assert_close(wrong_active, wrong_inactive)
    two = torch.tensor([[4.0, 1.0, 0.0]])
    miss_large = balanced_loss(torch.tensor([[-3.0, 3.0, -3.0]]), two)
    miss_small = balanced_loss(torch.tensor([[3.0, -3.0, -3.0]]), two)
    assert miss_large > miss_small


def test_a_larger_rank_is_taken_where_it_saves_more_neurons_than_it_costs() -> None:
    sizes = {"neurons": 16384, "hidden": 4096, "record_values": 8192}
    assert cheapest_rank({128: 0.05, 1024: 0.04}, **sizes) == 128
    assert cheapest_rank({128: 0.30, 1024: 0.10}, **sizes) == 1024


def test_a_made_predictor_reaches_its_recall_on_text_that_it_has_not_seen() -> None:
    torch.manual_seed(0)
    module = FeedForward(True, nn.ReLU(), True)
    layer = layer_of(module)
    made = make_predictor(layer, inputs_of(1600).view(16, 100, HIDDEN), 0.98, TrainingOptions(epochs=10))
    others = inputs_of(1000, seed=1)
    contributions = energy(layer.contributions(others))
    selected = made.predictor.select(others)
    assert contributions[selected].sum() > 0.96 * contributions.sum()
    pairs = made.predictor.select(others[:-1]) | made.predictor.select(others[1:])
    assert made.two_tokens == pytest.approx(pairs.float().mean().item(), rel=0.15)
    assert made.predictor.rank in (1, 2, 4)


def test_what_two_consecutive_tokens_need() -> None:
    selected = torch.zeros(2, 3, NEURONS, dtype=torch.bool)
    for sequence, token, neuron in [(0, 0, 0), (0, 1, 1), (0, 2, 1), (1, 0, 0), (1, 1, 2), (1, 2, 3)]:
        selected[sequence, token, neuron] = True
    assert needed_by_two_tokens(selected) * NEURONS == pytest.approx(1.75)
    assert needed_by_two_tokens(torch.zeros_like(selected)) == 1 / NEURONS
