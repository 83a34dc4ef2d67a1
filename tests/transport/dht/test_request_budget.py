from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.transport.dht.request_budget import (
    ANSWER_UNIT_BYTES,
    RESERVED_SHARE,
    CheckBudget,
    RequestBudget,
)


def test_a_burst_and_then_the_rate():
    budget = RequestBudget(burst=5, refill_per_s=2)
    assert [budget.allows(b"a", 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert budget.allows(b"b", 0.0)
    assert [budget.allows(b"a", 1.0) for _ in range(3)] == [True, True, False]
    assert sum(budget.allows(b"a", 100.0) for _ in range(10)) == 5


def test_long_answers_cost_more():
    budget = RequestBudget(burst=5, refill_per_s=1)
    assert budget.allows(b"a", 0.0)
    budget.charge_answer(b"a", 8 * ANSWER_UNIT_BYTES, 0.0)
    assert not budget.allows(b"a", 4.0)
    assert budget.allows(b"a", 5.0)


def test_each_record_to_be_verified_costs_as_much_as_a_request():
    budget = RequestBudget(burst=5, refill_per_s=1)
    assert budget.allows(b"a", 0.0, records=16)
    assert not budget.allows(b"a", 12.0)
    assert budget.allows(b"a", 13.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2), st.integers(0, 10**6)), max_size=200))
def test_nobody_gets_more_than_the_rate_and_memory_is_bounded(asked):
    budget = RequestBudget(burst=5, refill_per_s=2, max_peers=60)
    now, granted = 0.0, dict.fromkeys(range(51), 0)
    for peer, later, length in asked:
        now += later
        if budget.allows(bytes([peer]), now):
            granted[peer] += 1
            budget.charge_answer(bytes([peer]), length, now)
        assert granted[peer] <= 5 + 2 * now + 1e-6
    assert len(budget._budgets) <= 60


def test_newcomers_leave_checks_to_those_who_have_long_been_there():
    budget = CheckBudget(burst=100, refill_per_s=10)
    assert sum(budget.allows(0.0, False) for _ in range(1000)) == 100 * (1 - RESERVED_SHARE)
    assert sum(budget.allows(0.0, True) for _ in range(1000)) == 100 * RESERVED_SHARE
    assert not budget.allows(4.0, False)
    assert sum(budget.allows(4.0, True) for _ in range(1000)) == 40
    assert sum(budget.allows(10.0, False) for _ in range(1000)) == 10


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=300))
def test_all_together_get_no_more_than_the_rate(asked):
    budget, now, granted = CheckBudget(burst=20, refill_per_s=3), 0.0, 0
    for later, is_established in asked:
        now += later
        granted += budget.allows(now, is_established)
        assert granted <= 20 + 3 * now + 1e-6
