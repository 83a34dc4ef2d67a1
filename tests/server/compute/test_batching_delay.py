from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.server.compute import batching_delay
from swarm.server.compute.batching_delay import (
    CONTENDED_USE,
    MAX_DELAY_ITERATIONS,
    MAX_DELAY_S,
    SAMPLE_PERIOD_S,
    SESSION_EXPECTED_S,
    BatchingDelay,
    CpuContentionMeter,
    best_delay,
    is_contended,
)
from tests import virtual_time

T = 0.02
"""Seconds of an iteration."""

HERE = Span(0, 8)


def lost(wait: float, waiting: int, coming: list[float]) -> float:
    """Seconds that those lose together who are there when the iteration starts after `wait`."""
    return waiting * wait + sum(wait - seconds for seconds in coming if seconds <= wait)


arrivals = st.lists(st.floats(1e-4, 3 * T), max_size=8, unique=True).map(sorted)


@given(st.integers(1, 8), arrivals)
def test_no_other_time_is_better(waiting, coming):
    def gain(wait: float) -> float:
        return sum(T - seconds for seconds in coming if seconds <= wait) - lost(wait, waiting, coming)

    best = best_delay(waiting, coming, T)
    assert all(gain(best) >= gain(other) - 1e-12 for other in (0.0, *coming))


def test_nobody_is_waited_for_who_comes_later_than_half_an_iteration():
    assert best_delay(1, [0.49 * T], T) == 0.49 * T
    assert best_delay(1, [0.51 * T], T) == 0
    assert best_delay(7, [0.12 * T], T) == 0.12 * T
    assert best_delay(7, [0.13 * T], T) == 0


@given(st.integers(1, 8), arrivals, st.integers(1, 4))
def test_no_group_is_larger_than_its_share_of_the_sessions(waiting, coming, groups):
    delay = best_delay(waiting, coming, T, groups)
    there, all_of_them = waiting + sum(seconds <= delay for seconds in coming), waiting + len(coming)
    assert delay == 0 or (there - 1) * groups < all_of_them, "it has waited for nobody whom it does not need"
    soon = [0.01 * seconds for seconds in coming]
    there = waiting + sum(seconds <= best_delay(waiting, soon, T, groups) for seconds in soon)
    assert there * groups >= all_of_them, "whoever comes soon is waited for"


def test_sessions_that_are_away_for_long_are_not_waited_for_where_processes_compete():
    assert best_delay(1, [2.4 * T, 5 * T, 7.5 * T], T, 2) == 2.4 * T
    assert best_delay(1, [2.6 * T, 5 * T, 7.5 * T], T, 2) == 0


def cycles(sessions: dict[str, float], count: int = 3) -> tuple[BatchingDelay, float]:
    """Sessions that were answered together and came again after their times; and the clock, when they were last."""
    one, now = BatchingDelay(iteration=T), 100.0
    for _ in range(count):
        for session, away in sessions.items():
            one.on_request(session, now + away, HERE)
        now += max(sessions.values()) + T
        for session in sessions:
            one.on_answer(session, now)
    return one, now


def test_sessions_that_travel_together_are_waited_for():
    one, now = cycles({"a": 3 * T, "b": 3.2 * T, "c": 3.4 * T})
    one.on_request("a", now + 3 * T, HERE)
    assert one.delay(1, 0.0, 0, now + 3 * T, HERE) == pytest.approx(0.4 * T)
    one.on_request("b", now + 3.2 * T, HERE)
    assert one.delay(2, 0.2 * T, 0, now + 3.2 * T, HERE) == pytest.approx(0.2 * T)
    one.on_request("c", now + 3.4 * T, HERE)
    assert one.delay(3, 0.4 * T, 0, now + 3.4 * T, HERE) == 0


def test_a_session_alone_and_lanes_that_take_turns_wait_for_nobody():
    alone, now = cycles({"a": 3 * T})
    alone.on_request("a", now + 3 * T, HERE)
    assert alone.delay(1, 0.0, 1, now + 3 * T, HERE) == 0
    lanes, now = cycles({"a": 3 * T, "b": 4 * T})
    lanes.on_request("a", now + 3 * T, HERE)
    assert lanes.delay(1, 0.0, 0, now + 3 * T, HERE) == 0


def test_what_is_not_urgent_waits_for_an_urgent_session_that_would_have_to_wait_for_it():
    for away, expected in ((3.3 * T, 0.3 * T), (3.9 * T, 0.9 * T), (4.1 * T, 0.0)):
        one, now = cycles({"lazy": 3 * T, "urgent": away})
        one.on_request("lazy", now + 3 * T, HERE, urgent=False)
        assert one.delay(0, 0.0, 0, now + 3 * T, HERE, yielding=1) == pytest.approx(expected)
    one, now = cycles({"lazy": 3 * T, "urgent": 3.3 * T})
    one.on_request("lazy", now + 3 * T, HERE, urgent=False)
    assert one.delay(0, T, 0, now + 4 * T, HERE, yielding=1) == 0, "one iteration at most"


def test_what_is_not_urgent_waits_for_its_like_as_any_other_would():
    for away, expected in ((3.3 * T, 0.3 * T), (3.7 * T, 0.0)):
        one, now = cycles({"lazy": 3 * T, "other": away})
        one.on_request("other", now, HERE, urgent=False)
        one.on_answer("other", now)
        one.on_request("other", now + away, HERE, urgent=False)
        one.on_answer("other", now + away)
        one.on_request("lazy", now + away + 3 * T, HERE, urgent=False)
        at = now + 2 * away - (away - 3 * T)
        assert one.delay(0, 0.0, 0, at, HERE, yielding=1) == pytest.approx(expected)


def test_nothing_urgent_waits_for_what_is_not():
    one, now = cycles({"a": 3 * T, "b": 3.2 * T})
    one.on_request("b", now + 3 * T, HERE, urgent=False)
    one.on_answer("b", now + 3 * T)
    one.on_request("a", now + 5.9 * T, HERE)
    assert one.delay(1, 0.0, 0, now + 5.9 * T, HERE) == 0


def test_one_that_does_not_come_is_given_up():
    one, now = cycles({"a": 3 * T, "b": 3.2 * T})
    one.on_request("a", now + 3 * T, HERE)
    clock, waited = now + 3 * T, 0.0
    while delay := one.delay(1, waited, 0, clock, HERE):
        clock, waited = clock + delay, waited + delay
    assert 0.2 * T < waited <= T


def test_where_others_want_the_processors_it_waits_longer():
    one, now = cycles({"a": 3 * T, "b": 4.2 * T})
    one.on_request("a", now + 3 * T, HERE)
    assert one.delay(1, 0.0, 0, now + 3 * T, HERE) == 0
    assert one.delay(1, 0.0, 1, now + 3 * T, HERE) == pytest.approx(1.2 * T)
    assert one.delay(1, MAX_DELAY_ITERATIONS * T, 1, now + 3 * T, HERE) == 0


def test_where_processes_compete_sessions_travel_in_a_group_for_each_processor():
    one, now = cycles({session: (3 + 0.2 * number) * T for number, session in enumerate("abcdefgh")})
    for number, session in enumerate("abcd"):
        at = now + (3 + 0.2 * number) * T
        one.on_request(session, at, HERE)
        delay = one.delay(number + 1, 0.2 * number * T, 2, at, HERE)
        assert delay > 0.19 * T if session != "d" else delay == 0
    assert one.delay(4, 0.0, 1, at, HERE) > 0, "all eight on a single processor"
    assert one.delay(4, 0.0, 16, at, HERE) == 0


def test_slow_blocks_wait_no_longer_than_it_can_be_of_use():
    one, now = cycles({"a": 3.0, "b": 3.2})
    one.on_iteration(1.0)
    one.on_request("a", now + 3.0, HERE)
    assert one.delay(1, 0.0, 0, now + 3.0, HERE) == MAX_DELAY_S


def test_who_has_not_come_for_long_is_not_expected():
    one, now = cycles(dict.fromkeys("abcdefgh", 3 * T))
    assert one.sessions == 8
    one.on_request("a", now + SESSION_EXPECTED_S + 0.1, HERE)
    one.on_answer("a", now + SESSION_EXPECTED_S + 0.1 + T)
    assert one.sessions == 1


def test_the_first_iteration_of_all_waits_for_nothing():
    one = BatchingDelay()
    for session in "abcdefgh":
        one.on_request(session, 0.0, HERE)
    assert one.delay(1, 0.0, 1, 0.0, HERE) == 0


@pytest.mark.parametrize(
    ("other", "joins_parts", "waits"),
    [
        (HERE, False, True),
        (HERE, True, True),
        (Span(2, 4), True, True),
        (Span(2, 4), False, False),
        (Span(4, 9), True, False),
        (Span(8, 9), True, False),
    ],
)
def test_only_a_session_that_could_be_in_the_iteration_is_waited_for(other, joins_parts, waits):
    def delay(session: str, **waiting: int) -> float:
        one = BatchingDelay(iteration=T)
        for now in (100.0, 100.0 + 4 * T):
            one.on_request("other", now, other, joins_parts, urgent=session == "other")
            one.on_answer("other", now + T)
            one.on_request("first", now, HERE, joins_parts)
        return one.delay(now=100.0 + 7.8 * T, waited=0.0, groups=0, span=HERE, joins_parts=joins_parts, **waiting)

    assert (delay("other", waiting=1) > 0) == waits
    assert (delay("none", waiting=0, yielding=1) > 0) == waits
    assert delay("other", waiting=0, yielding=1) > 0, "an urgent one would have to wait for it"


shares = st.floats(0, 1)


@given(shares)
def test_processes_compete_if_the_machine_is_busy_with_more_than_this_one(used):
    assert not is_contended(used, 0.9 * used)
    assert is_contended(used, used / 3) == (used > CONTENDED_USE)


def test_other_processes_are_gone_again_when_it_measures_next(monkeypatch):
    """The machine is played: others may keep a real one busy for as long as they like."""
    used = 0.9
    monkeypatch.setattr(batching_delay.psutil, "cpu_count", lambda: 8)
    monkeypatch.setattr(batching_delay, "ProcessorUse", lambda: SimpleNamespace(shares=lambda: (used, 0.0)))

    async def scenario():
        nonlocal used
        meter = CpuContentionMeter()
        assert meter.groups(2) == 4
        used = 0.1
        await asyncio.sleep(0.9 * SAMPLE_PERIOD_S)
        assert meter.groups(2) == 4
        await asyncio.sleep(0.2 * SAMPLE_PERIOD_S)
        assert meter.groups(2) == 0
        used = 0.9
        await asyncio.sleep(SAMPLE_PERIOD_S)
        assert meter.groups(16) == 1

    virtual_time.run(scenario)
