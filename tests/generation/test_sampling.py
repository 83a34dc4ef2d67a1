"""The choice of the next token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from swarm.generation.sampling import SampledToken, Sampler, SamplingOptions

SCORES = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0]])


def choose(sampling: SamplingOptions, count: int = 1, constraint=None) -> list[SampledToken]:
    chosen: list[SampledToken] = []
    sampler = Sampler(sampling, constraint, chosen.append)
    for _ in range(count):
        left = sampler(torch.zeros(1, 1, dtype=torch.long), SCORES)
        assert int(left.argmax()) == chosen[-1].token
        assert int((left > float("-inf")).sum()) == 1
    return chosen


def tokens(sampling: SamplingOptions, count: int = 1) -> list[int]:
    return [chosen.token for chosen in choose(sampling, count)]


def test_greedy_takes_the_most_likely():
    assert tokens(SamplingOptions(temperature=0), 3) == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 5e-324])
def test_tiny_temperatures_are_greedy(temperature):
    assert tokens(SamplingOptions(temperature=temperature), 3) == [1, 1, 1]


def test_frequencies_are_those_of_the_softmax():
    counts = Counter(tokens(SamplingOptions(seed=1), 4000))
    expected = torch.softmax(SCORES[0], 0)
    for token in range(5):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_a_seed_gives_the_same_text_whatever_else_is_sampled():
    first = tokens(SamplingOptions(seed=5), 20)
    torch.manual_seed(0)
    sampler_state = torch.get_rng_state()
    assert tokens(SamplingOptions(seed=5), 20) == first
    assert torch.equal(torch.get_rng_state(), sampler_state)
    assert tokens(SamplingOptions(seed=6), 20) != first
    assert tokens(SamplingOptions(), 20) != tokens(SamplingOptions(), 20)


def test_top_k_and_top_p():
    assert set(tokens(SamplingOptions(top_k=2, seed=1), 200)) == {1, 2}
    assert set(tokens(SamplingOptions(top_p=0.5, seed=1), 200)) == {1}


def test_penalties_count_what_was_generated():
    # 3 and 2: after one choice of token 1 its score is 3 - 1.5 = 1.5.
    assert tokens(SamplingOptions(temperature=0, presence_penalty=1.5), 2) == [1, 2]
    assert tokens(SamplingOptions(temperature=0, frequency_penalty=0.6), 4) == [1, 1, 2, 1]


def test_bias():
    assert tokens(SamplingOptions(temperature=0, logit_bias={3: 100.0})) == [3]
    assert 1 not in tokens(SamplingOptions(seed=2, logit_bias={1: -100.0}), 300)


def test_log_probabilities_are_the_models_own():
    (chosen,) = choose(SamplingOptions(temperature=0, top_logprobs=2))
    expected = torch.log_softmax(SCORES[0], 0)
    assert chosen.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in chosen.top_logprobs] == [1, 2]
    assert choose(SamplingOptions(temperature=0, top_logprobs=0))[0].top_logprobs == ()
    assert choose(SamplingOptions(temperature=0))[0].logprob is None


def test_a_constraint_masks_scores_and_receives_tokens():
    class Only:
        heard: list[int] = []

        def mask(self, scores_V):
            return torch.where(torch.arange(5) == 4, scores_V, -math.inf)

        def accept(self, token):
            self.heard.append(token)

    only = Only()
    assert [chosen.token for chosen in choose(SamplingOptions(), 3, only)] == [4, 4, 4]
    assert only.heard == [4, 4, 4]
