from __future__ import annotations

import pytest

from swarm.server.gathering import ABOUT, LONGEST, PART, Gathering

ITERATION = 0.01


def busy(*sessions: str, iteration: float = ITERATION) -> tuple[Gathering, float]:
    """A server that has computed without rest for some seconds, and its clock."""
    result, now = Gathering(), 0.0
    while now < 5:
        now += iteration
        result.computed(iteration, now)
    for session in sessions:
        result.came(session, now)
    return result, now


def test_a_session_or_two_wait_for_nobody():
    for sessions in ("a", "ab", "abc"):
        one, now = busy(*sessions)
        assert one.patience(1, now) == 0


def test_few_of_many_wait_a_part_of_an_iteration():
    one, now = busy(*"abcdefgh")
    assert [one.patience(waiting, now) > 0 for waiting in (1, 3, 4, 8)] == [True, True, False, False]
    assert one.patience(1, now) == pytest.approx(PART * ITERATION)


def test_slow_servers_wait_no_longer_than_it_can_be_of_use():
    one, now = busy(*"abcdefgh", iteration=3.0)
    assert one.patience(1, now) == LONGEST


def test_a_server_with_time_to_spare_starts_at_once():
    one, now = busy(*"abcdefgh")
    for _ in range(100):
        now += 5 * ITERATION
        one.computed(ITERATION, now)
        for session in "abcdefgh":
            one.came(session, now)
        patience = one.patience(1, now)
    assert patience == 0


def test_who_has_not_come_for_long_is_not_expected():
    one, now = busy(*"abcdefgh")
    one.came("a", now + ABOUT + 0.1)
    assert one.enough == 0


def test_a_session_that_comes_again_counts_once():
    one, now = busy(*"abcd")
    for number in range(100):
        one.came("abcd"[number % 4], now + number / 100)
    assert one.enough == 2


def test_the_first_iteration_of_all_waits_for_nothing():
    one = Gathering()
    for session in "abcdefgh":
        one.came(session, 0.0)
    assert one.patience(1, 0.0) == 0
