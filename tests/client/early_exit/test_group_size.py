"""How many steps are verified together, against groups that are played through."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.early_exit.group_size import (
    FIRST_SIZES,
    MAX_GROUP,
    MIN_GAIN,
    TRIED_EVERY,
    GroupMeter,
    GroupTimes,
    best_group_size,
    tokens_per_second,
)

shares = st.floats(0, 1)
seconds = st.floats(1e-4, 10)
times = st.builds(GroupTimes, single=seconds, further=st.floats(0, 10), recall=st.floats(0, 10))


def played(size: int, leaves: float, stands: float, times: GroupTimes, draw: random.Random) -> tuple[int, float]:
    """The tokens and seconds of one group."""
    tokens, took, right = 1, times.single, True
    for _ in range(size - 1):
        if draw.random() >= leaves:
            return tokens, took + times.recall
        took += times.further
        right = right and draw.random() < stands
        tokens += right
    return tokens, took


@pytest.mark.parametrize(("size", "leaves", "stands"), [(1, 0.5, 0.5), (2, 0.7, 0.6), (5, 0.9, 0.8), (16, 1.0, 0.5)])
def test_the_rate_is_that_of_many_groups(size, leaves, stands):
    taken, draw = GroupTimes(single=5.0, further=2.0, recall=1.0), random.Random(size)
    groups = [played(size, leaves, stands, taken, draw) for _ in range(20_000)]
    measured = sum(tokens for tokens, _ in groups) / sum(took for _, took in groups)
    assert tokens_per_second(size, leaves, stands, taken) == pytest.approx(measured, rel=0.02)


@given(st.integers(1, MAX_GROUP), shares, st.floats(0.001, 10), st.floats(0.001, 10))
def test_where_all_tokens_leave_it_is_the_formula_of_speculative_decoding(size, stands, front, behind):
    """k steps cost k times the front and once what is behind, and give 1 + p + ... + p^(k-1) tokens."""
    taken = GroupTimes(single=front + behind, further=front, recall=1.0)
    expected = sum(stands**number for number in range(size)) / (size * front + behind)
    assert tokens_per_second(size, 1.0, stands, taken) == pytest.approx(expected)


@given(shares, shares, times)
def test_no_size_is_quicker_than_the_best_and_groups_have_to_gain(leaves, stands, taken):
    best = best_group_size(leaves, stands, taken)
    rates = {size: tokens_per_second(size, leaves, stands, taken) for size in range(1, MAX_GROUP + 1)}
    assert 1 <= best <= MAX_GROUP
    if best == 1:
        assert max(rates.values()) < MIN_GAIN * rates[1]
    else:
        assert rates[best] == max(rates.values())
        assert rates[best] >= MIN_GAIN * rates[1]


@given(shares, times)
def test_guesses_that_never_stand_gain_nothing(share, taken):
    assert best_group_size(share, 0.0, taken) == 1
    assert best_group_size(0.0, share, taken) == 1


def run(meter: GroupMeter, groups: int, leaves: bool, stands: bool, behind: float) -> list[int]:
    """The sizes of groups whose front takes 1 and whose verification takes `behind`."""
    sizes = []
    for _ in range(groups):
        sizes.append(size := meter.next_size())
        if size > 1 and not leaves:
            meter.on_look(False)
            meter.on_group(1, 1.5 + behind, recalled=True)
            continue
        for _ in range(size - 1):
            meter.on_look(True)
        for _ in range(size - 1 if stands else min(size - 1, 1)):
            meter.on_verified(stands)
        meter.on_group(size, size + behind, recalled=False)
    return sizes


def test_the_first_groups_are_of_both_kinds():
    assert run(GroupMeter(), len(FIRST_SIZES), True, True, 3.0) == list(FIRST_SIZES)


def test_guesses_that_stand_make_groups_long():
    assert max(run(GroupMeter(), 200, True, True, 3.0)) == MAX_GROUP


@pytest.mark.parametrize(("leaves", "stands", "behind"), [(True, False, 3.0), (False, True, 3.0), (True, True, 0.01)])
def test_where_groups_do_not_pay_tokens_stay_but_for_one_try_now_and_then(leaves, stands, behind):
    meter = GroupMeter()
    run(meter, 100, leaves, stands, behind)
    sizes = run(meter, 10 * TRIED_EVERY, leaves, stands, behind)
    assert sizes.count(2) == 10
    assert sizes.count(1) == len(sizes) - 10


def test_guesses_that_begin_to_stand_are_noticed():
    meter = GroupMeter()
    run(meter, 100, True, False, 3.0)
    run(meter, 20 * TRIED_EVERY, True, True, 3.0)
    assert max(run(meter, TRIED_EVERY, True, True, 3.0)) > 2
