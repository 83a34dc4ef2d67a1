"""Deadlines and timings of one server's answers."""

from __future__ import annotations

import pytest

from swarm.client.hops.hop_progress import NO_DEADLINE, HopClock
from swarm.client.wire.timeout_estimator import TimeoutEstimator
from swarm.data_structures import HopTiming


def clock() -> HopClock:
    return HopClock(TimeoutEstimator(0.1, 0.01, 60.0))


def test_the_deadline_runs_from_when_the_first_step_became_the_next_one():
    one = clock()
    one.on_handed(0, 0, 1, now=10.0)
    assert one.deadline == 10.0 + one.timeouts.timeout(1)
    one.on_handed(1, 0, 2, now=15.0)
    assert one.deadline == 10.0 + one.timeouts.timeout(2)
    one.on_reply(0, 1, 0.5, False, now=16.0)
    assert one.deadline == NO_DEADLINE
    one.on_handed(1, 1, 1, now=16.0)
    assert one.deadline == 16.0 + one.timeouts.timeout(1)
    one.stop()
    assert one.deadline == NO_DEADLINE


def test_the_steps_of_a_call_are_timed_together():
    one = clock()
    one.on_handed(0, 0, 1, now=0.0)
    one.on_reply(0, 1, 0.5, False, now=1.0)
    assert one.timing == HopTiming(1.0, 0.5)
    one.on_handed(1, 1, 1, now=1.0)
    one.on_reply(1, 1, 0.25, True, now=3.0)
    assert one.timing == HopTiming(3.0, 0.75)
    one.on_handed(2, 2, 1, now=3.0)
    one.on_reply(2, 1, 0.25, False, now=4.0)
    assert one.timing == HopTiming(1.0, 0.25)


def test_an_answer_whose_start_is_not_known_teaches_nothing():
    one = clock()
    before = one.timeouts.timeout(1)
    one.on_expected(now=0.0)
    one.on_reply(0, 1, 0.5, False, now=100.0)
    assert one.timing == HopTiming(0.5, 0.5)
    assert one.timeouts.timeout(1) == before
    one.on_handed(1, 1, 1, now=100.0)
    one.on_reply(1, 1, 0.5, False, now=130.0)
    assert one.timeouts.timeout(1) > before
    assert one.timing == HopTiming(pytest.approx(30.0), 0.5)


def test_answers_to_tokens_that_left_say_nothing_about_those_that_did_not():
    timeouts = TimeoutEstimator(10.0, 1.0, 1000.0)
    one = HopClock(timeouts)
    before = timeouts.timeout(1)
    for number in range(50):
        one.on_handed(number, number, 1, 100.0 * number)
        one.on_reply(number, 1, 0.01, False, 100.0 * number + 0.01, full=False)
        assert one.timing.total == pytest.approx(0.01)
    assert timeouts.timeout(1) == before
    one.on_handed(50, 50, 1, 5000.0)
    one.on_reply(50, 1, 0.01, False, 5000.01)
    assert timeouts.timeout(1) != before


def test_an_answer_is_late_when_its_usual_time_is_over():
    one = clock()
    assert one.late_from == NO_DEADLINE
    for number in range(100):
        one.on_handed(number, number, 1, 10.0 * number)
        one.on_reply(number, 1, 0.5, False, 10.0 * number + 0.5)
    assert (one.measured, one.take_measured(), one.take_measured()) == (100, (0.5, 1), None)
    assert one.slowness == pytest.approx(1.0, rel=0.01)
    one.on_handed(100, 100, 1, now=1000.0)
    assert one.late_from == pytest.approx(1000.5, rel=1e-5)
    assert one.late_at(4.0) == pytest.approx(1002.0, rel=1e-5)
    assert one.waited(1003.0) == 3.0
    one.on_handed(101, 100, 3, now=1001.0, first_tokens=1)  # one more behind it
    assert one.late_from == pytest.approx(1000.5, rel=1e-5)
    one.on_reply(100, 1, 0.5, False, 1002.0)
    assert one.slowness == pytest.approx(4.0, rel=0.01)


def test_time_in_which_the_client_stood_still_does_not_count():
    one = clock()
    one.on_handed(0, 0, 1, now=0.0)
    late, deadline = one.late_from, one.deadline
    one.excuse(100.0)
    assert (one.late_from, one.deadline) == pytest.approx((late + 100, deadline + 100))
    one.on_reply(0, 1, 0.5, False, 101.0)
    assert one.take_measured() == (1.0, 1)
