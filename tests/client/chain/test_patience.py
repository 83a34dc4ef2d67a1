"""When others are asked beside a server that is late, and when a slow one is left."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.late import (
    ASKED_SHARE,
    MAX_ALLOWANCE,
    MAX_SLOWNESS,
    AskAllowance,
    common_slowness,
    first_late,
    is_worth_leaving,
)
from swarm.client.hops.hop_progress import NO_STEP, HopClock
from swarm.client.wire.timeout_estimator import TimeoutEstimator

seconds = st.floats(1e-4, 10.0)


@dataclass
class Hop:
    clock: HopClock
    awaited: int | None = None
    asked: int = NO_STEP
    replied: int = 9


def hop(usual: float, last: float | None = None, handed: float | None = None, **changes: int) -> Hop:
    """A server that takes `usual` seconds a step, took `last` for the last one, and has been handed step 10."""
    clock = HopClock(TimeoutEstimator(usual, usual, 60.0))
    times = [usual] * 60 + ([last] if last is not None else [])
    for number, took in enumerate(times):
        clock.on_handed(number, number, 1, 0.0)
        clock.on_reply(number, 1, took, False, took)
    if handed is None:
        return Hop(clock, None, **changes)
    clock.on_handed(10, 10, 1, handed)
    return Hop(clock, 10, **changes)


def test_nobody_is_asked_while_nothing_is_awaited():
    assert first_late([hop(0.1), hop(0.1)], [1.0, 1.0]) is None


def test_others_are_asked_after_the_usual_time_and_what_asking_costs():
    found = first_late([hop(0.1), hop(0.1, handed=5.0)], [1.0, 0.25])
    assert (found.index, found.number) == (1, 10)
    assert found.time == pytest.approx(5.0 + 0.1 + 0.25, rel=1e-3)


def test_nobody_is_asked_twice_for_a_step_or_for_one_that_came_through():
    assert first_late([hop(0.1, handed=5.0, asked=10)], [1.0]) is None
    assert first_late([hop(0.1, handed=5.0), hop(0.1, replied=10)], [1.0, 1.0]) is None
    assert first_late([hop(0.1, handed=5.0), hop(0.1, replied=9)], [1.0, 1.0]) is not None


def test_the_first_to_be_late_is_asked_about_first():
    route = [hop(1.0, handed=5.0), hop(0.1, handed=5.0), hop(0.1, handed=5.0)]
    assert first_late(route, [0.0, 0.2, 0.1]).index == 2


@given(st.lists(st.tuples(seconds, seconds, st.none() | seconds), min_size=1, max_size=4), st.floats(0.0, 10.0))
def test_nothing_is_late_before_the_usual_time_has_passed(times, refill):
    route = [hop(usual, last, handed) for usual, last, handed in times]
    late = first_late(route, [refill] * len(route))
    assert late is None or late.time >= min(one.clock.late for one in route)


@given(seconds, seconds, st.floats(1.0, 6.0))
def test_a_machine_that_is_busy_gets_as_much_longer_as_all_others_take(usual, other, slower):
    calm = first_late([hop(usual, handed=0.0), hop(other)], [0.0, 0.0])
    busy = first_late([hop(usual, handed=0.0), hop(other, other * slower)], [0.0, 0.0])
    assert busy.time == pytest.approx(slower * calm.time, rel=1e-2)


@given(st.lists(seconds, min_size=1, max_size=5), st.data())
def test_one_server_that_is_as_quick_as_usual_excuses_nobody(times, data):
    route = [hop(time, 100 * time) for time in times]
    assert 1 <= common_slowness(route, 0) <= MAX_SLOWNESS
    assert common_slowness([*route, hop(1.0)], data.draw(st.integers(0, len(times) - 1))) == pytest.approx(1, rel=1e-3)


@given(st.lists(st.booleans(), max_size=400))
def test_a_session_asks_for_few_of_its_steps(late):
    allowance, asked = AskAllowance(), 0
    for number, is_late in enumerate(late, 1):
        asked += is_late and allowance.take()
        allowance.on_answered()
        assert asked <= 1 + ASKED_SHARE * number


def test_an_allowance_is_not_saved_up():
    allowance = AskAllowance()
    for _ in range(10_000):
        allowance.on_answered()
    assert sum(allowance.take() for _ in range(100)) == MAX_ALLOWANCE


@given(seconds, seconds, st.integers(0, 1000), seconds)
def test_a_server_is_left_only_when_it_has_cost_as_much_as_that_does(here, elsewhere, steps, refill):
    if is_worth_leaving(here, elsewhere, steps, refill):
        assert here >= 2 * elsewhere * (1 - 1e-9)
        assert steps * (here - elsewhere) >= refill
    assert not is_worth_leaving(here, here, steps, refill)


def test_a_drip_is_left():
    assert is_worth_leaving(2.0, 0.01, 8, 1.0)
    assert not is_worth_leaving(2.0, 0.01, 8, 100.0)
