from __future__ import annotations

import pytest

from swarm.server.gathering import KNOWN, LONGEST, PART, Gathering


def gathering(*company: str, seconds: float = 0.01) -> Gathering:
    result = Gathering()
    result.computed(company, seconds)
    return result


def test_a_session_alone_waits_for_nobody():
    assert not gathering("a").missing({"a"})
    assert not Gathering().missing({"a"})
    assert Gathering().patience(frozenset(), 0.0) == 0


def test_company_is_waited_for_a_part_of_an_iteration():
    one = gathering("a", "b", "c", seconds=0.01)
    assert one.missing({"a"}) == {"b", "c"}
    assert one.patience(one.missing({"a"}), 0.0) == pytest.approx(PART * 0.01)
    assert not one.missing({"a", "b", "c"})


def test_slow_servers_wait_no_longer_than_it_can_be_of_use():
    assert gathering("a", "b", seconds=10.0).patience(frozenset("b"), 0.0) == LONGEST


def test_two_companies_that_meet_are_one():
    one = gathering("a", "b")
    one.computed(["c", "d"], 0.01)
    assert one.missing({"a", "c"}) == {"b", "d"}
    one.computed(["a", "b", "c", "d"], 0.01)
    assert one.missing({"a"}) == {"b", "c", "d"}


def test_who_comes_late_is_waited_for_less_and_then_no_more():
    one = gathering("a", "b")
    now, before = 0.0, one.patience(frozenset("b"), 0.0)
    while before:
        one.came("b", now + PART * 0.01 * 1.01)
        now += 1
        patience = one.patience(frozenset("b"), now)
        assert patience <= before / 2
        before = patience
    assert one.patience(frozenset("bc"), now) == pytest.approx(PART * 0.01)


def test_who_does_not_come_at_all_is_late():
    one = gathering("a", "b")
    one.patience(frozenset("b"), 0.0)
    one.patience(frozenset(), 1.0)
    assert one.patience(frozenset("b"), 2.0) == pytest.approx(PART * 0.01 / 2)


def test_trust_comes_back_also_where_nobody_waits_any_more():
    one = gathering("a", "b")
    for now in range(20):
        one.patience(frozenset("b"), now)
        one.came("b", now + 0.5)
    assert one.patience(frozenset("b"), 20) == 0
    for now in range(20, 30):
        one.came("b", now + 0.001)
        assert one.patience(frozenset("b"), now + 1) >= 0
    assert one.patience(frozenset("b"), 30) == pytest.approx(PART * 0.01)


def test_who_went_alone_since_has_no_company():
    one = gathering("a", "b")
    one.computed(["a"], 0.01)
    assert not one.missing({"a"})
    assert one.missing({"b"}) == {"a"}


def test_memory_is_bounded():
    one = Gathering()
    for number in range(3 * KNOWN):
        one.computed([number], 0.01)
        one.patience(frozenset([number]), float(number))
    assert len(one._company) == KNOWN
    assert len(one._trust) <= KNOWN + 1
