"""How sure a token is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.exits.confidence import FLOOR_SHARE, decayed_threshold, softmax_response, state_similarity


@given(st.lists(st.lists(st.floats(-50, 50), min_size=4, max_size=4), min_size=1, max_size=5))
def test_softmax_response_is_the_lead_of_the_likeliest_token(rows):
    found = softmax_response(torch.tensor(rows))
    for row, value in zip(rows, found.tolist(), strict=True):
        weights = [math.exp(one - max(row)) for one in row]
        first, second = sorted(weights, reverse=True)[:2]
        assert value == pytest.approx((first - second) / sum(weights), abs=1e-5)


def test_a_vocabulary_of_one_token_is_sure():
    assert softmax_response(torch.zeros(3, 1)).tolist() == [1.0] * 3


def test_similarity_ignores_length():
    before = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    after = torch.tensor([[5.0, 0.0], [1.0, -1.0], [-1.0, 0.0]])
    torch.testing.assert_close(state_similarity(before, after), torch.tensor([1.0, 0.0, -1.0]))
    assert state_similarity(before.bfloat16(), after.bfloat16()).dtype == torch.float32


@given(st.floats(0, 1), st.floats(0, 100), st.integers(0, 1000), st.integers(0, 1000))
def test_a_threshold_falls_to_nine_tenths(threshold, decay, position, length):
    here = decayed_threshold(threshold, decay, position, length)
    assert FLOOR_SHARE * threshold - 1e-9 <= here <= threshold + 1e-9
    assert decayed_threshold(threshold, decay, position + 1, length) <= here + 1e-9
    assert decayed_threshold(threshold, decay, 0, length) == pytest.approx(threshold)
    assert decayed_threshold(threshold, 0.0, position, length) == threshold
