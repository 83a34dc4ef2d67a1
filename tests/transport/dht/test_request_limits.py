from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.transport.dht.request_limits import ANSWER_UNIT_BYTES, RequestLimits


def test_a_burst_and_then_the_rate():
    limits = RequestLimits(burst=5, refill_per_s=2)
    assert [limits.allows(b"a", 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert limits.allows(b"b", 0.0)
    assert [limits.allows(b"a", 1.0) for _ in range(3)] == [True, True, False]
    assert sum(limits.allows(b"a", 100.0) for _ in range(10)) == 5


def test_long_answers_cost_more():
    limits = RequestLimits(burst=5, refill_per_s=1)
    assert limits.allows(b"a", 0.0)
    limits.charge_answer(b"a", 8 * ANSWER_UNIT_BYTES, 0.0)
    assert not limits.allows(b"a", 4.0)
    assert limits.allows(b"a", 5.0)


def test_each_record_to_be_verified_costs_as_much_as_a_request():
    limits = RequestLimits(burst=5, refill_per_s=1)
    assert limits.allows(b"a", 0.0, records=16)
    assert not limits.allows(b"a", 12.0)
    assert limits.allows(b"a", 13.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2), st.integers(0, 10**6)), max_size=200))
def test_nobody_gets_more_than_the_rate_and_memory_is_bounded(asked):
    limits = RequestLimits(burst=5, refill_per_s=2, max_peers=60)
    now, granted = 0.0, dict.fromkeys(range(51), 0)
    for peer, later, length in asked:
        now += later
        if limits.allows(bytes([peer]), now):
            granted[peer] += 1
            limits.charge_answer(bytes([peer]), length, now)
        assert granted[peer] <= 5 + 2 * now + 1e-6
    assert len(limits._budgets) <= 60
