"""The choice of the next token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.generation.errors import InvalidGenerationRequest
from swarm.generation.sampling import SampledToken, Sampler, position_seed
from swarm.generation.sequence_request import SequenceRequest

PROMPT = (0, 1)
SCORES = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0]])


def after(text: Sequence[int]) -> torch.Tensor:
    """A prompt of two tokens, and what was generated."""
    return torch.tensor([[*PROMPT, *text]])


def chosen_by(sampler: Sampler, text: Sequence[int], scores: torch.Tensor = SCORES) -> int:
    left = sampler(after(text), scores)
    assert int((left > float("-inf")).sum()) == 1
    return int(left.argmax())


def choose(sampling: SequenceRequest, count: int = 1, constraint=None) -> list[SampledToken]:
    chosen: list[SampledToken] = []
    sampler = Sampler(replace(sampling, prompt=PROMPT, constraint=constraint))
    for position in range(count):
        token = chosen_by(sampler, [one.token for one in chosen])
        chosen.append(sampler.sampled(token, position))
    return chosen


def tokens(sampling: SequenceRequest, count: int = 1) -> list[int]:
    return [chosen.token for chosen in choose(sampling, count)]


def test_greedy_takes_the_most_likely():
    assert tokens(SequenceRequest(temperature=0), 3) == [1, 1, 1]


def test_tiny_temperatures_are_greedy():
    for temperature in [1e-9, 1e-40, 5e-324]:
        assert tokens(SequenceRequest(temperature=temperature), 3) == [1, 1, 1]


def test_frequencies_are_those_of_the_softmax():
    counts = Counter(tokens(SequenceRequest(seed=1), 4000))
    expected = torch.softmax(SCORES[0], 0)
    for token in range(5):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_a_seed_gives_the_same_text_whatever_else_is_sampled():
    first = tokens(SequenceRequest(seed=5), 20)
    torch.manual_seed(0)
    sampler_state = torch.get_rng_state()
    assert tokens(SequenceRequest(seed=5), 20) == first
    assert torch.equal(torch.get_rng_state(), sampler_state)
    assert tokens(SequenceRequest(seed=6), 20) != first
    assert tokens(SequenceRequest(), 20) != tokens(SequenceRequest(), 20)


def test_top_k_and_top_p():
    assert set(tokens(SequenceRequest(top_k=2, seed=1), 200)) == {1, 2}
    assert set(tokens(SequenceRequest(top_k=0, seed=1), 400)) == {0, 1, 2, 3, 4}
    assert set(tokens(SequenceRequest(top_p=0.5, seed=1), 200)) == {1}


def test_min_p_is_a_share_of_the_likeliest():
    for min_p, left in [(0.3, {1, 2}), (0.1, {0, 1, 2}), (1.0, {1})]:
        assert set(tokens(SequenceRequest(min_p=min_p, seed=1), 200)) == left


def test_penalties_count_what_was_generated():
    # 3 and 2: after one choice of token 1 its score is 3 - 1.5 = 1.5.
    assert tokens(SequenceRequest(temperature=0, presence_penalty=1.5), 2) == [1, 2]
    assert tokens(SequenceRequest(temperature=0, frequency_penalty=0.6), 4) == [1, 1, 2, 1]


def test_bias():
    assert tokens(SequenceRequest(temperature=0, logit_bias={3: 100.0})) == [3]
    assert 1 not in tokens(SequenceRequest(seed=2, logit_bias={1: -100.0}), 300)


def test_log_probabilities_are_the_models_own():
    (chosen,) = choose(SequenceRequest(temperature=0, top_logprobs=2))
    expected = torch.log_softmax(SCORES[0], 0)
    assert chosen.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in chosen.top_logprobs] == [1, 2]
    assert choose(SequenceRequest(temperature=0, top_logprobs=0))[0].top_logprobs == ()
    assert choose(SequenceRequest(temperature=0))[0].logprob is None


def test_a_constraint_masks_scores_behind_what_was_generated():
    class Count:
        heard: list[list[int]] = []

        def mask(self, tokens, scores_V):
            self.heard.append(list(tokens))
            return torch.where(torch.arange(5) == len(tokens), scores_V, -math.inf)

    count = Count()
    assert [chosen.token for chosen in choose(SequenceRequest(), 3, count)] == [0, 1, 2]
    assert count.heard == [[], [0], [0, 1]]


SETTINGS = [
    SequenceRequest(temperature=0, presence_penalty=1.5),
    SequenceRequest(seed=7, frequency_penalty=0.5, top_k=4),
    SequenceRequest(temperature=1.7, top_p=0.9, seed=7, top_logprobs=2),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6))
def test_guesses_change_nothing(sampling, guesses):
    """Tokens that are chosen behind other texts and from other scores, and given up."""
    sampler = Sampler(replace(sampling, prompt=PROMPT))
    text: list[int] = []
    found: list[SampledToken] = []
    for position, plain in enumerate(choose(sampling, 6)):
        for guess in guesses:
            chosen_by(sampler, [*text, *guess], SCORES.flip(1) * (1 + len(guess)))
        text.append(chosen_by(sampler, text))
        found.append(sampler.sampled(text[-1], position))
        assert found[-1] == plain


def test_the_same_random_numbers_judge_a_guess_and_the_full_models_scores():
    """So a guess from nearly the same scores nearly always stands."""
    sampler, close = Sampler(SequenceRequest(seed=3, prompt=PROMPT)), SCORES + 0.01 * SCORES.flip(1)
    same = sum(chosen_by(sampler, [0] * place) == chosen_by(sampler, [0] * place, close) for place in range(500))
    assert same > 480


def test_positions_have_random_numbers_of_their_own():
    assert len({position_seed(seed, place) for seed in (0, 1, -1, 2**62) for place in range(1000)}) > 3990


def test_a_constraint_that_fails_behind_a_guess_ends_nothing():
    class Failing:
        """Cannot go on behind token 3, and allows 2 and 3 elsewhere."""

        def mask(self, tokens: Sequence[int], scores_V: torch.Tensor) -> torch.Tensor:
            if 3 in tokens:
                raise InvalidGenerationRequest("too complex")
            return scores_V.index_fill(0, torch.tensor([0, 1, 4]), float("-inf"))

    sampler = Sampler(SequenceRequest(temperature=0, prompt=PROMPT, constraint=Failing()))
    assert chosen_by(sampler, []) == 2
    assert chosen_by(sampler, [3]) == 1
    sampler.sampled(2, 0)
    assert chosen_by(sampler, [2]) == 2
    assert chosen_by(sampler, [2, 3]) == 1
    sampler.sampled(3, 1)
    with pytest.raises(InvalidGenerationRequest):
        sampler(after([2, 3]), SCORES)
