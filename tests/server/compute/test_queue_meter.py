from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.compute.queue_meter import FADE_S, MAX_REMEMBERED_JOBS, QueueMeter


def test_nobody_waits_before_the_first_job():
    assert QueueMeter().expected_wait(123.0) == 0.0


@pytest.mark.parametrize("interval", [0.0, 0.001, 1.0, FADE_S / 2])
def test_a_steady_queue_is_seen_as_it_is(interval):
    meter = QueueMeter()
    now = 0.0
    for _ in range(100):
        now += interval
        meter.record_start(0.25, now)
    assert meter.expected_wait(now) == pytest.approx(0.25)


def test_one_long_wait_is_seen_at_once():
    meter = QueueMeter()
    meter.record_start(2.0, 0.0)
    assert meter.expected_wait(0.0) == 2.0


def test_it_turns_from_the_past_to_the_present():
    meter = QueueMeter()
    for _ in range(1000):
        meter.record_start(5.0, 0.0)
    for _ in range(60):
        meter.record_start(0.1, 0.0)
    assert meter.expected_wait(0.0) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("jobs", [1, 100_000])
def test_it_fades_when_nothing_comes_whatever_came_before(jobs):
    meter = QueueMeter()
    for _ in range(jobs):
        meter.record_start(5.0, 0.0)
    assert meter.expected_wait(10 * FADE_S) < 5.0 * MAX_REMEMBERED_JOBS * 1e-4
    assert meter.expected_wait(20 * FADE_S) < meter.expected_wait(10 * FADE_S)


@given(st.lists(st.tuples(st.floats(-1, 3600), st.floats(-1, 1000)), max_size=40), st.floats(0, 1e4))
def test_it_lies_between_nothing_and_the_longest_wait(jobs, later):
    meter = QueueMeter()
    now = 0.0
    for waited, step in jobs:  # clocks of two threads may be read in the wrong order
        now += step
        meter.record_start(waited, now)
    longest = max((waited for waited, _ in jobs), default=0.0)
    assert 0 <= meter.expected_wait(now + later) <= max(longest, 0.0) * (1 + 1e-9)
    assert meter.expected_wait(now + later + 1) <= meter.expected_wait(now + later) * (1 + 1e-9)
