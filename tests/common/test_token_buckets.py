from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.common.token_buckets import TokenBuckets


def test_a_bucket_is_full_at_first_and_refills():
    buckets = TokenBuckets[str](burst=4, refill_per_s=2, max_keys=10)
    assert buckets.left("a", 0.0) == 4
    buckets.take("a", 3, 0.0)
    assert buckets.left("a", 0.0) == 1
    assert buckets.left("a", 1.0) == 3
    assert buckets.left("a", 100.0) == 4
    assert buckets.left("b", 0.0) == 4


def test_more_may_be_taken_than_there_is():
    buckets = TokenBuckets[str](burst=4, refill_per_s=2, max_keys=10)
    buckets.take("a", 10, 0.0)
    assert buckets.left("a", 0.0) == -6
    assert buckets.left("a", 3.0) == 0


def test_a_clock_that_goes_back_refills_nothing():
    buckets = TokenBuckets[str](burst=4, refill_per_s=2, max_keys=10)
    buckets.take("a", 3, 10.0)
    assert buckets.left("a", 5.0) == 1


def test_the_bucket_that_nothing_was_taken_from_for_longest_is_forgotten():
    buckets = TokenBuckets[str](burst=4, refill_per_s=0, max_keys=2)
    buckets.take("a", 1, 0.0)
    buckets.take("b", 1, 0.0)
    buckets.take("a", 0, 0.0)
    buckets.left("b", 0.0)  # to look at a bucket does not keep it
    buckets.take("c", 1, 0.0)
    assert [buckets.left(key, 0.0) for key in "abc"] == [3, 4, 3]
    assert len(buckets) == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.floats(0, 8)), max_size=100))
def test_each_key_has_its_burst_and_the_rate_and_no_more(takes):
    """Against one bucket per key that is refilled in the plainest way."""
    buckets = TokenBuckets[str](burst=5, refill_per_s=2, max_keys=3)
    reference, now = dict.fromkeys("abc", 5.0), 0.0
    for key, pause, amount in takes:
        now += pause
        reference = {one: min(5.0, left + 2 * pause) for one, left in reference.items()}
        reference[key] -= amount
        buckets.take(key, amount, now)
        for one, left in reference.items():
            assert abs(buckets.left(one, now) - left) < 1e-6
