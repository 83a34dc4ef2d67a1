"""Which guesses are worth sending."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.speculation.guess_policy import (
    FIRST_PAUSE,
    MAX_CHANCE,
    MEASURED,
    MIN_CHANCE,
    TRIED_EVERY,
    Acceptance,
    GuessPolicy,
    Pace,
)
from swarm.data_structures import HopTiming

CHANCES = st.floats(0, 1)


@given(CHANCES)
def test_at_first_a_draft_is_believed(probability):
    assert Acceptance().chance(probability) == pytest.approx(probability, abs=0.08)
    assert Acceptance().mean == 1


@given(CHANCES, st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.integers(0, 99))
def test_later_it_is_believed_as_far_as_its_guesses_stood(probability, right, seed):
    chance, acceptance = random.Random(seed), Acceptance()
    for _ in range(300):
        acceptance.on_verified(probability, chance.random() < right)
    assert acceptance.chance(probability) == pytest.approx(right, abs=0.4)
    assert acceptance.mean == pytest.approx(right, abs=0.4)
    if right in (0, 1):
        assert acceptance.chance(probability) == pytest.approx(right, abs=0.01)


@given(CHANCES, st.sampled_from([0, 3, 300]))
def test_the_next_text_begins_with_what_was_found_out_and_soon_finds_out_other_things(probability, guesses):
    before = Acceptance()
    for _ in range(guesses):
        before.on_verified(probability, False)
    after = Acceptance(before)
    assert after.chance(probability) == pytest.approx(before.chance(probability))
    assert after.mean == pytest.approx(before.mean)
    for _ in range(4):
        after.on_verified(probability, True)
    assert after.chance(probability) > 0.6


def test_guesses_of_other_probabilities_are_counted_apart():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.on_verified(0.99, True)
        acceptance.on_verified(0.2, False)
    assert acceptance.chance(0.99) > 0.95
    assert acceptance.chance(0.2) < 0.05


@given(st.floats(0.001, 1), st.floats(0.0001, 0.2), st.floats(4, 128))
def test_a_guess_has_to_be_worth_what_it_costs(token_s, compute_s, overhead):
    policy = GuessPolicy([Acceptance()], overhead)
    assert policy.least_chance == MIN_CHANCE
    for _ in range(50):
        policy.on_tokens(1, token_s, waited=token_s)
        policy.on_answer(1, [HopTiming(9, compute_s / 2), HopTiming(9, compute_s)])
    cost = compute_s / (overhead + 1)
    assert policy.least_chance == pytest.approx(min(max(MIN_CHANCE, cost / token_s), MAX_CHANCE))


def test_a_guess_is_in_the_way_of_all_for_whom_a_server_computes():
    found = []
    for sessions in (1, 8):
        policy = GuessPolicy([Acceptance()], 9)
        policy.on_tokens(1, 0.1, waited=0.1)
        policy.on_answer(1, [HopTiming(9, 0.02, sessions), HopTiming(9, 0.03, 1)])
        found.append(policy.least_chance)
    assert found == [pytest.approx(0.03), pytest.approx(0.16)]


def test_the_clients_time_counts_where_it_is_what_all_wait_for():
    for waited, least in ((0.1, MIN_CHANCE), (0.05, 0.1), (0.0, 0.2)):
        policy = GuessPolicy([Acceptance()], 16)
        policy.on_tokens(1, 0.1, waited)
        policy.on_proposed(0.06, tokens=3)
        assert policy.least_chance == pytest.approx(least)


def test_the_prompt_says_what_to_expect():
    policy = GuessPolicy([Acceptance()], 9)
    policy.on_prompt(41, [HopTiming(0.6, 0.5), HopTiming(0.8, 0.5, sessions=4)])
    # A token takes 0.6 s: 0.4 on the way, and a fifth of the prompt's time at each server.
    assert policy.least_chance == pytest.approx(4 * 0.5 / 50 / 0.6)
    assert policy.useful_steps == math.inf


def test_no_more_steps_are_sent_than_fit_into_the_way_of_one():
    policy = GuessPolicy([Acceptance()], 16)
    assert policy.useful_steps == math.inf
    for round_s, compute_s, steps in [(0.3, [0.01, 0.005], 30), (0.02, [0.019], 1), (0.01, [0.03], 1)]:
        policy = GuessPolicy([Acceptance()], 16)
        policy.pace.on_round(round_s)
        policy.on_answer(1, [HopTiming(9, seconds) for seconds in compute_s])
        assert policy.useful_steps == steps


def test_hopeless_drafts_are_tried_again_now_and_then():
    policy = GuessPolicy([Acceptance()], 16)
    assert sum(policy.may_try() for _ in range(10 * TRIED_EVERY)) == 10


@pytest.mark.parametrize(("guessing_s", "most"), [(0.2, 0.25), (0.11, 0.25), (0.09, 1.0), (0.01, 1.0)])
def test_guessing_goes_on_only_if_it_makes_the_text_faster(guessing_s, most):
    pace, guessed, tokens = Pace(), 0, 2000
    pace.on_round(0.1)
    for _ in range(tokens):
        guessed += pace.guesses
        pace.on_tokens(1, guessing_s if pace.guesses else 0.1, guessing=pace.guesses)
    share = guessed / tokens
    assert (share < 0.06) if guessing_s > 0.1 else (share > 0.95)


@given(st.integers(0, 200), st.floats(0.02, 0.07))
def test_a_standstill_is_not_blamed_on_guessing(stall, guessing_s):
    pace = Pace()
    pace.on_round(0.1)
    for token in range(300):
        pace.on_tokens(1, 2.0 if token == stall else guessing_s, guessing=True)
        assert pace.guesses


def test_a_way_that_has_become_slow_is_left_and_one_that_has_become_fast_found_again():
    pace = Pace()

    def write(guessing_s: float) -> int:
        """Tokens until guessing is switched on or off."""
        before, tokens = pace.guesses, 0
        while pace.guesses == before:
            tokens += 1
            pace.on_tokens(1, guessing_s if pace.guesses else 0.1, guessing=pace.guesses)
        return tokens

    pace.on_round(0.1)
    assert write(0.2) == MEASURED[True]
    assert write(0.2) == MEASURED[False] + FIRST_PAUSE
    assert write(0.2) == MEASURED[True]
    assert write(0.05) == MEASURED[False] + 2 * FIRST_PAUSE
    for _ in range(1000):
        pace.on_tokens(1, 0.05, guessing=True)
    assert pace.guesses
