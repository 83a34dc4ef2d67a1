"""How long steps that nothing waits for wait for more of their session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, MAX_YIELD_S
from swarm.server.compute.step_gathering import LATE_FACTOR, StepGathering, best_count

seconds = st.floats(0, 1)


def running_ahead(away: float = 0.003, first: float = 0.008, later: float = 0.015) -> StepGathering:
    """A session whose client has written some tokens without waiting for the later part; its newest is pushed at 1.0"""
    found = StepGathering()
    now = 1.0 - 4 * (away + first)
    found.on_push(now, 0, [0])
    for number in range(1, 5):
        found.on_step(now + away, ahead=True, computing=False)
        now += away + first
        found.on_push(now, 0, [number])
    found.on_computed(1, 0, later)
    return found


def test_without_experience_nothing_waits():
    found = StepGathering()
    assert found.delay(1, 0.0, 0.0) == 0
    found.on_step(0.0, ahead=False, computing=False)
    found.on_push(0.01, 0, [3])
    found.on_computed(1, 0, 0.02)
    assert found.delay(1, 0.0, 0.01) == 0
    found.on_step(0.05, ahead=False, computing=False)  # its client waits for the whole span
    found.on_push(0.06, 0, [4])
    assert found.delay(1, 0.0, 0.06) == 0


def test_a_step_waits_until_the_next_one_is_late():
    found = running_ahead()
    assert found.delay(1, 0.0, 1.0) == pytest.approx(LATE_FACTOR * 0.003)
    assert found.delay(1, 0.004, 1.004) == pytest.approx(LATE_FACTOR * 0.003 - 0.004)
    assert found.delay(1, 0.007, 1.007) == 0


def test_while_the_first_part_computes_the_next_step_it_is_waited_for():
    found = running_ahead()
    found.on_step(1.003, ahead=True, computing=False)
    assert found.delay(1, 0.02, 1.02) == pytest.approx(MAX_YIELD_S - 0.02)
    assert found.delay(1, MAX_YIELD_S, 1.02) == 0


def test_a_client_that_is_far_away_is_not_waited_for():
    assert running_ahead(away=0.05).delay(1, 0.0, 1.0) == 0


def test_enough_steps_do_not_wait_for_more():
    found = running_ahead()
    enough = best_count(0.011, 0.015, found.stands)
    assert 1 < enough < MAX_SHORT_TOKENS
    assert found.delay(enough - 1, 0.0, 1.0) > 0
    assert found.delay(enough, 0.0, 1.0) == 0


def test_guesses_that_never_stand_are_verified_one_by_one():
    found = running_ahead()
    for epoch in range(1, 30):
        found.on_push(1.0, epoch, [epoch])
        found.on_computed(3, epoch, 0.015)
    assert found.stands < 0.1
    assert found.delay(1, 0.0, 1.0) == 0


def test_guesses_that_always_stand_are_gathered_to_a_full_step():
    found = running_ahead()
    for _ in range(100):
        found.on_computed(4, 0, 0.015)
    assert found.stands > 0.98
    assert found.delay(5, 0.0, 1.0) > 0


def test_how_often_guesses_stand_is_counted_in_tokens_between_wrong_ones():
    """Every third guess is wrong: what was computed behind it does not count."""
    found = StepGathering()
    for epoch in range(60):
        found.on_push(float(epoch), epoch, [3 * epoch])
        found.on_computed(8, epoch, 0.015)
    found.on_push(60.0, 60, [180])
    assert found.stands == pytest.approx(1 - 1 / 3, abs=0.01)


times = st.integers(1, 1000).map(lambda milliseconds: milliseconds / 1000)
shares = st.integers(0, 20).map(lambda twentieths: twentieths / 20)


@given(times, times, shares, times, shares)
def test_better_guesses_and_a_dearer_later_part_never_make_fewer_steps(first, later, stands, more, better):
    least = best_count(first, later, stands)
    assert 1 <= least <= MAX_SHORT_TOKENS
    for dearer, surer in ((later, min(1.0, stands + better)), (later + more, stands)):
        count = best_count(first, dearer, surer)
        # Where two counts are equally good, rounding decides.
        assert count >= least or rate(count, first, dearer, surer) == pytest.approx(rate(least, first, dearer, surer))


def rate(count: int, first: float, later: float, stands: float) -> float:
    return sum(stands**number for number in range(count)) / (count * first + later)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), seconds, st.booleans(), st.booleans()),
            st.tuples(st.just("push"), seconds, st.integers(0, 3), st.integers(0, 50)),
            st.tuples(st.just("computed"), seconds, st.integers(0, 16), st.integers(0, 3)),
        )
    ),
    seconds,
    st.integers(1, 64),
)
def test_no_wait_is_longer_than_steps_may_yield(events, waited, waiting):
    found, now = StepGathering(), 0.0
    for kind, passed, one, two in events:
        now += passed
        if kind == "step":
            found.on_step(now, bool(one), bool(two))
        elif kind == "push":
            found.on_push(now, one, [two])
        else:
            found.on_computed(one, two, passed)
        assert 0 <= found.delay(waiting, waited, now) <= max(0.0, MAX_YIELD_S - waited)
        assert 0 <= found.stands <= 1
