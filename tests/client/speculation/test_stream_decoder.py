"""The loop of speculative decoding, with servers on a virtual clock."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.wide_area.virtual import Chain, generate, planted

TOKENS = 400
CHAINS = {
    "far": Chain(),
    "far and slow": Chain(step_s=0.02, token_s=0.002),
    "near": Chain(delay_s=0.001, step_s=0.005, draft_s=0.003),
    "one server, a slow draft": Chain(servers=1, delay_s=0.0005, step_s=0.02, token_s=0.002, draft_s=0.004),
}


@pytest.mark.parametrize("name", CHAINS)
def test_guesses_never_slow_a_text_down_and_right_ones_make_it_as_fast_as_the_slowest_server(name):
    chain = CHAINS[name]
    plain = generate(chain, TOKENS, lambda swarm: []).rate
    found = {
        right: [planted(chain, right, TOKENS, seed) for seed in range(5)] for right in (0.0, 0.3, 0.5, 0.8, 0.95, 1.0)
    }
    rates = {right: mean(one.rate for one in texts) for right, texts in found.items()}
    assert min(rates.values()) >= 0.97 * plain
    if chain.delay_s == 0.05:
        for texts in found.values():  # of the guesses that were drawn, as many were right as were
            assert mean(one.rate / chain.bound(one.stood) for one in texts) >= 0.85
        assert rates[0.8] >= 3.5 * plain
        assert rates[0.95] >= 8 * plain


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.floats(0.0, 0.1),
    st.floats(0.0005, 0.02),
    st.floats(0.0, 0.01),
    st.floats(0.0, 1.0),
    st.integers(0, 99),
)
def test_texts_are_right_whatever_the_servers_and_the_draft(servers, delay_s, step_s, draft_s, right, seed):
    planted(Chain(servers, delay_s, step_s, step_s / 8, draft_s=draft_s), right, 60, seed)
