"""Sliding windows, and the usage of a key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.admission.api_keys import KeyLimits
from swarm.gateway.admission.rate_limits import WINDOW_S, KeyUsage, SlidingWindow

FREE = KeyLimits()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20), st.integers(0, 60), st.integers(0, 50))
def test_a_window_knows_how_long_to_wait(steps, rest, amount):
    window, now = SlidingWindow(), 0.0
    for seconds, count in steps:
        now += seconds
        window.add(now, count)
    now += rest
    wait = window.seconds_until(now, amount)
    assert wait >= 0
    assert window.sum(now + wait) <= amount
    if wait > 0:
        earlier = SlidingWindow()
        for (_, count), when in zip(steps, [sum(s for s, _ in steps[: i + 1]) for i in range(len(steps))], strict=True):
            earlier.add(when, count)
        assert earlier.sum(now + wait - 0.5) > amount


def test_a_key_without_limits_is_never_rejected():
    KeyUsage(open=10**6, reserved=10**9).check_limits(FREE, 10**9, 0.0)


def test_a_window_drops_old_entries_without_being_read():
    window = SlidingWindow()
    for second in range(1000):
        window.add(float(second), 1)
    assert len(window._entries) <= WINDOW_S
