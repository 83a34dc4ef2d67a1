from __future__ import annotations

import pytest

from swarm.server.gathering import ABOUT, LONGEST, SHARE, Gathering


def gathering(*sessions: str, seconds: float = 0.01) -> Gathering:
    result = Gathering()
    result.took(seconds)
    for session in sessions:
        result.came(session, 0.0)
    return result


def test_a_session_alone_waits_for_nobody():
    assert gathering("a").patience(1) == 0


def test_nobody_waits_where_all_are_there():
    assert gathering("a", "b", "c").patience(3) == 0


def test_others_are_waited_for_a_share_of_an_iteration():
    assert gathering("a", "b", seconds=0.01).patience(1) == pytest.approx(SHARE * 0.01)
    assert gathering("a", "b", seconds=10.0).patience(1) == LONGEST


def test_nothing_is_lost_where_nothing_waits():
    assert gathering("a", "b").patience(0) == 0


def test_who_has_not_come_for_long_is_not_waited_for():
    one = gathering("a", "b", "c")
    one.came("b", ABOUT + 1)
    assert one.about == 1
    assert one.patience(1) == 0
    one.came("a", ABOUT + 2)
    assert one.about == 2


def test_a_session_that_comes_again_counts_once():
    one = gathering("a", "b")
    for number in range(100):
        one.came("ab"[number % 2], number / 10)
    assert one.about == 2
