"""Sampled tokens that left early have the full model's distribution in the end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.early_exit.verification import verify_sampled

DRAWS = 20_000
LOGITS = st.lists(st.sampled_from([-float("inf"), -2.0, 0.0, 1.0, 3.0]), min_size=5, max_size=5).filter(
    lambda row: max(row) > -float("inf")
)


def draw(guess: list[float], full: list[float], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Guesses, and what became of them."""
    generator = torch.Generator().manual_seed(seed)
    guess_scores, scores = (torch.tensor(one).expand(DRAWS, -1) for one in (guess, full))
    guesses = torch.multinomial(guess_scores.softmax(-1), 1, generator=generator).squeeze(1)
    return guesses, verify_sampled(guesses, guess_scores, scores, generator)


@settings(max_examples=25)
@given(LOGITS, LOGITS, st.integers(0, 2**31))
def test_the_distribution_is_that_of_the_full_model(guess, full, seed):
    _, tokens = draw(guess, full, seed)
    expected = torch.tensor(full).softmax(-1)
    counts = torch.bincount(tokens, minlength=5)
    assert not counts[expected == 0].any()
    possible = expected > 0
    squares = (counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible])
    # Chi squared, at most four degrees of freedom: 40 is exceeded by chance once in 20 million.
    assert float(squares.sum()) < 40


def test_random_numbers_are_drawn_where_the_tokens_are():
    """The device `meta` refuses tensors that are elsewhere, as a GPU does."""
    scores = torch.zeros(3, 5, device="meta")
    assert verify_sampled(torch.zeros(3, dtype=torch.long, device="meta"), scores, scores).device.type == "meta"


def test_equal_distributions_never_reject():
    guesses, tokens = draw([0.0, 1.0, 2.0, -1.0, 0.5], [0.0, 1.0, 2.0, -1.0, 0.5], 0)
    assert guesses.equal(tokens)


@pytest.mark.parametrize("token", [0, 3])
def test_what_the_full_model_rules_out_is_always_replaced(token):
    full = [-float("inf") if one == token else 0.0 for one in range(5)]
    guesses, tokens = draw([0.0] * 5, full, 1)
    assert (guesses == token).any()
    assert not (tokens == token).any()
    assert guesses[guesses != token].equal(tokens[guesses != token])
