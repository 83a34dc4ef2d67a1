"""How long a client waits for an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.wire.timeout_estimator import STALL_ALLOWANCE_S, TIMEOUT_FACTOR, TimeoutEstimator

seconds = st.floats(0, 1e4)
tokens = st.integers(1, 10**6)


def test_before_the_first_reply_the_announcement_counts():
    patience = TimeoutEstimator(0.5, 0.01, 60.0)
    assert patience.timeout(1) == STALL_ALLOWANCE_S + TIMEOUT_FACTOR * (0.5 + TIMEOUT_FACTOR * 0.25)
    assert patience.timeout(101) == pytest.approx(patience.timeout(1) + TIMEOUT_FACTOR * 100 * 0.01)


def test_a_slow_announcement_counts_only_until_the_first_answer():
    """A server could hang for a minute after each quick answer, however many other servers there are."""
    patience = TimeoutEstimator(4000.0, 4000.0, 60.0)
    assert patience.timeout(1) == 60.0
    patience.observe(0.01, 1)
    assert patience.timeout(1) < STALL_ALLOWANCE_S + 1.3
    slow = TimeoutEstimator(4000.0, 4000.0, 60.0)
    slow.observe(3.0, 1)
    assert slow.timeout(1) >= STALL_ALLOWANCE_S + TIMEOUT_FACTOR * 3.0


def test_long_steps_change_the_time_of_a_token_but_not_of_short_steps():
    patience = TimeoutEstimator(0.1, 1e-5, 600.0)
    before = patience.timeout(1)
    for _ in range(30):
        patience.observe(0.1 + 0.02 * 999, 1000)
    assert patience.timeout(1) == before
    assert patience.timeout(1000) >= 0.02 * 999


def test_a_server_that_slows_down_gradually_does_not_time_out():
    patience = TimeoutEstimator(0.1, 0.01, 1e6)
    took = 0.1
    for _ in range(500):
        assert took <= patience.timeout(1)
        patience.observe(took, 1)
        took *= 1.02


@given(seconds, seconds, st.lists(st.tuples(seconds, tokens), max_size=30), tokens, st.floats(0.1, 1e3))
def test_the_timeout_is_bounded_and_grows_with_the_tokens(step, token, answers, wanted, limit):
    patience = TimeoutEstimator(step, token, limit)
    for took, count in answers:
        patience.observe(took, count)
    assert min(STALL_ALLOWANCE_S, limit) <= patience.timeout(wanted) <= limit
    assert patience.timeout(wanted) <= patience.timeout(wanted + 1)


def test_lateness_follows_the_usual_time_of_the_shape():
    patience = TimeoutEstimator(1.0, 0.5, 60.0)
    assert patience.late_after(1) == patience.timeout(1) - STALL_ALLOWANCE_S
    for _ in range(100):
        patience.observe(0.1, 1)
        patience.observe(2.0, 100)
    assert patience.late_after(1) == pytest.approx(0.1, rel=0.01)
    assert patience.late_after(100) == patience.late_after(127) == pytest.approx(2.0, rel=0.01)
    assert patience.late_after(128) == patience.timeout(128) - STALL_ALLOWANCE_S


def test_varying_times_are_late_later():
    steady, varying = TimeoutEstimator(1.0, 0.01, 60.0), TimeoutEstimator(1.0, 0.01, 60.0)
    for number in range(100):
        steady.observe(1.0, 1)
        varying.observe(0.5 if number % 2 else 1.5, 1)
    assert varying.late_after(1) > 2 * steady.late_after(1)
    assert varying.observe(2.0, 1) == pytest.approx(2.0, rel=0.1)
    assert varying.observe(2.0, 64) == 1.0


def test_a_refill_costs_the_best_time_of_a_token():
    patience = TimeoutEstimator(1.0, 0.01, 60.0)
    assert patience.refill_seconds(100) == pytest.approx(1.0)
    patience.observe(0.5, 500)
    patience.observe(50.0, 500)
    assert patience.refill_seconds(100) == pytest.approx(0.1)


@given(seconds, seconds, st.lists(st.tuples(seconds, tokens), max_size=30), tokens, st.floats(0.1, 1e3))
def test_lateness_is_bounded(step, token, answers, wanted, limit):
    patience = TimeoutEstimator(step, token, limit)
    for took, count in answers:
        patience.observe(took, count)
    assert 0 <= patience.late_after(wanted) <= limit
    assert 0 <= patience.refill_seconds(wanted) <= limit
    assert patience.observe(1.0, wanted) >= 0
