"""Tokens that are drawn several times: as guesses, and from the full model's scores."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.client.sampling import PositionNoise

DRAWS = 20_000
LOGITS = st.lists(st.sampled_from([-float("inf"), -2.0, 0.0, 1.0, 3.0]), min_size=5, max_size=5).filter(
    lambda row: max(row) > -float("inf")
)


@settings(max_examples=25, deadline=None)
@given(LOGITS, LOGITS, st.integers(0, 2**31))
def test_the_distribution_is_that_of_the_full_model_whatever_was_guessed(guess, full, seed):
    """And guesses stand as often as shared random numbers promise (Gumbel coupling)."""
    torch.manual_seed(seed)
    guessed, expected = (torch.tensor(one).softmax(-1).repeat(DRAWS, 1) for one in (guess, full))
    noise = PositionNoise()
    guesses, tokens = noise.draw(guessed, 7), noise.draw(expected, 7)
    counts = torch.bincount(tokens, minlength=5)
    assert not counts[expected[0] == 0].any()
    possible = expected[0] > 0
    squares = (counts - DRAWS * expected[0])[possible] ** 2 / (DRAWS * expected[0][possible])
    # Chi squared, at most four degrees of freedom: 40 is exceeded by chance once in 20 million.
    assert float(squares.sum()) < 40
    distance = float((expected[0] - guessed[0]).abs().sum() / 2)
    assert float((guesses == tokens).float().mean()) >= (1 - distance) / (1 + distance) - 0.03


def test_tokens_and_the_state_behind_them_are_those_of_torch():
    for seed, rows in [(seed, 1 + seed % 3) for seed in range(50)]:
        probabilities = torch.rand(rows, 30, generator=torch.Generator().manual_seed(seed)).softmax(-1)
        torch.manual_seed(seed)
        expected = [torch.multinomial(probabilities, 1).squeeze(1).tolist() for _ in range(5)]
        behind = torch.rand(1)
        torch.manual_seed(seed)
        noise = PositionNoise()
        noise.draw(probabilities, 7)
        noise.draw(probabilities, 7 + 6)  # a guess
        assert [noise.draw(probabilities, 7 + number).tolist() for number in range(5)] == expected
        noise.end(7 + 5)
        assert torch.rand(1).equal(behind)
