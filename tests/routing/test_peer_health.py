"""What a client remembers of servers that failed, lied or were slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.routing.peer_health import (
    DISTRUST_S,
    FORGET_AFTER_S,
    HALF_LIFE_S,
    KEPT_STEPS,
    MAX_BAN_S,
    MAX_KEPT_REASONS,
    MAX_OVERRUN_S,
    MAX_PARTNERS,
    PARTNER_PENALTY_S,
    RETRY_AFTER_S,
    LinkTrust,
    MeasuredOverruns,
    PeerFailure,
    PeerHealth,
)

failures = st.sampled_from(list(PeerFailure))
pauses = st.floats(0, 3000)


def test_bans_double_up_to_the_longest():
    health = PeerHealth()
    now, lengths = 0.0, []
    for _ in range(12):
        until = health.record_failure("a", PeerFailure.TIMED_OUT, now)
        lengths.append(until - now)
        now = until
    first = PeerFailure.TIMED_OUT.ban_seconds
    assert lengths[:4] == [first, 2 * first, 4 * first, 8 * first]
    assert lengths[-1] == MAX_BAN_S


def test_many_sessions_that_see_one_fault_are_one_strike():
    one, many = PeerHealth(), PeerHealth()
    until = one.record_failure("a", PeerFailure.TIMED_OUT, 0.0)
    for number in range(50):
        assert many.record_failure("a", PeerFailure.TIMED_OUT, 0.01 * number) == until + 0.01 * number
    assert many.reasons("a") == one.reasons("a")
    assert many.penalties(1.0) == one.penalties(1.0)
    again = many.banned_until("a", 1.0)
    assert (
        many.record_failure("a", PeerFailure.TIMED_OUT, again) - again == 2 * PeerFailure.TIMED_OUT.ban_seconds
    )  # it was used again


def test_a_worse_fault_during_a_ban_makes_it_longer():
    health = PeerHealth()
    health.record_failure("a", PeerFailure.UNREACHABLE, 0.0)
    assert health.record_failure("a", PeerFailure.WRONG_ANSWER, 1.0) == 1.0 + PeerFailure.WRONG_ANSWER.ban_seconds
    assert health.reasons("a") == (PeerFailure.UNREACHABLE, PeerFailure.WRONG_ANSWER)


def test_a_full_cache_does_not_hide_a_fault():
    health = PeerHealth()
    for now in (0.0, 1.0, 2.0):
        health.record_failure("a", PeerFailure.CACHE_FULL, now)
    health.record_failure("a", PeerFailure.FAULT, 3.0)
    assert health.penalties(3.0)["a"] > 0


def test_a_full_or_closing_server_is_avoided_shortly_without_a_strike():
    for reason in (PeerFailure.CACHE_FULL, PeerFailure.CLOSING):
        health = PeerHealth()
        for now in (0.0, 100.0, 200.0):
            assert health.record_failure("a", reason, now) == now + reason.ban_seconds
        assert reason.ban_seconds <= PeerFailure.UNREACHABLE.ban_seconds
        assert health.penalties(200.0) == {}


def test_a_mild_failure_does_not_shorten_a_long_ban():
    health = PeerHealth()
    until = health.record_failure("a", PeerFailure.WRONG_ANSWER, 0.0)
    assert health.record_failure("a", PeerFailure.CACHE_FULL, 1.0) == until
    assert health.reasons("a") == (PeerFailure.WRONG_ANSWER, PeerFailure.CACHE_FULL)


def test_a_success_clears_the_record_after_as_long_as_the_ban_lasted():
    health = PeerHealth()
    until = health.record_failure("a", PeerFailure.TIMED_OUT, 0.0)
    health.record_success("a", 1.0)  # a session that still runs
    assert health.is_banned("a", 1.0)
    health.record_success("a", until)
    assert health.penalties(until)["a"] > 0
    health.record_success("a", 2 * until)
    assert health.penalties(2 * until) == {}
    assert health.record_failure("a", PeerFailure.TIMED_OUT, 1000.0) == 1000.0 + PeerFailure.TIMED_OUT.ban_seconds


def test_old_failures_are_forgotten():
    health = PeerHealth()
    until = health.record_failure("a", PeerFailure.TIMED_OUT, 0.0)
    later = until + FORGET_AFTER_S
    assert health.penalties(later) == {}
    assert health.record_failure("a", PeerFailure.TIMED_OUT, later) == later + PeerFailure.TIMED_OUT.ban_seconds


def test_memory_is_bounded_and_the_oldest_failure_is_forgotten_first():
    health = PeerHealth(max_peers=3)
    for now, peer in enumerate("abcad"):
        health.record_failure(peer, PeerFailure.TIMED_OUT, now)
    assert len(health) == 3
    assert health.banned_peers(5.0) == {"c", "a", "d"}
    now = 5.0
    for _ in range(100):
        now = health.record_failure("a", PeerFailure.REFUSED, now)
    assert len(health.reasons("a")) == MAX_KEPT_REASONS


@given(st.lists(st.tuples(failures, pauses, st.booleans()), min_size=1, max_size=40))
@settings(deadline=None, max_examples=300)
def test_while_failing_a_ban_never_ends_sooner_than_it_was_said(events):
    health = PeerHealth()
    now = until = 0.0
    for reason, pause, answers in events:
        now += pause
        before = health.banned_until("a", now)
        if answers:
            health.record_success("a", now)
            assert health.banned_until("a", now) == before
            continue
        until = health.record_failure("a", reason, now)
        assert until >= now + reason.ban_seconds
        assert until <= now + MAX_BAN_S
        assert before is None or until >= before
        assert health.banned_until("a", now) == until
        assert reason in health.reasons("a")


@given(failures)
def test_only_a_peer_from_which_nothing_came_is_worth_another_try_and_not_at_once(reason):
    health = PeerHealth()
    until = health.record_failure("a", reason, 0.0)
    assert health.worth_a_try(RETRY_AFTER_S / 2) == frozenset()
    assert (health.worth_a_try(RETRY_AFTER_S) == {"a"}) is (reason in (PeerFailure.UNREACHABLE, PeerFailure.TIMED_OUT))
    assert health.worth_a_try(until) == frozenset()  # it is not banned any more


def test_a_peer_that_fails_again_is_left_alone_again_and_a_graver_failure_counts():
    health = PeerHealth()
    health.record_failure("a", PeerFailure.UNREACHABLE, 0.0)
    until = health.record_failure("a", PeerFailure.UNREACHABLE, 3.0)
    assert health.worth_a_try(4.0) == frozenset()
    assert health.worth_a_try(3.0 + RETRY_AFTER_S) == {"a"}
    assert until == 3.0 + PeerFailure.UNREACHABLE.ban_seconds, "tries during a ban are no further strikes"
    health.record_failure("a", PeerFailure.WRONG_ANSWER, 6.0)
    assert health.worth_a_try(10.0) == frozenset()


peers = st.sampled_from("abcdef")
pairs = st.lists(st.tuples(peers, peers).filter(lambda pair: pair[0] != pair[1]), max_size=12)


@given(pairs, st.floats(0, DISTRUST_S * 0.9))
def test_links_are_distrusted_for_a_while_with_their_penalties(caught, now):
    trust = LinkTrust()
    for one, other in caught:
        trust.distrust(one, other, 0.0)
    partners = {peer: {b if a == peer else a for a, b in caught if peer in (a, b)} for peer in "abcdef"}
    for one in "abcdef":
        assert trust.penalties(now).get(one, 0.0) == len(partners[one]) * PARTNER_PENALTY_S
        for other in set("abcdef") - {one}:
            alone = any(len(partners[peer]) >= MAX_PARTNERS for peer in (one, other))
            assert trust.trusts(one, other, now) == (other not in partners[one] and not alone)
            assert trust.trusts(one, other, DISTRUST_S)


@given(pairs)
def test_a_lying_server_affects_at_most_two_neighbors(attempts):
    """However it chooses them, and whoever else is caught meanwhile."""
    trust, caught = LinkTrust(), set()
    for _, other in attempts:
        if other != "a" and trust.trusts("a", other, 0.0):
            trust.distrust("a", other, 0.0)
            caught.add(other)
    assert len(caught) <= MAX_PARTNERS


def test_the_number_of_remembered_links_is_bounded():
    trust = LinkTrust(max_links=2)
    for other in "bcd":
        trust.distrust("x" + other, other, 0.0)
    assert [trust.trusts("x" + other, other, 0.0) for other in "bcd"] == [True, False, False]


times = st.floats(-100.0, 100.0)


def measured(**peers: float) -> MeasuredOverruns:
    overruns = MeasuredOverruns()
    for peer_id, seconds in peers.items():
        overruns.record(peer_id, seconds, 0.0)
    return overruns


def test_a_server_is_charged_with_what_it_takes_beyond_the_others():
    assert measured(slow=1.0, quick=0.1, middling=0.4).charges(0.0) == pytest.approx(
        {"slow": 0.9, "quick": 0.0, "middling": 0.3}
    )


def test_a_server_that_stalls_for_a_moment_is_not_slow():
    overruns = measured(one=0.0, other=0.0)
    overruns.record("one", 0.0, 0.0)
    overruns.record("one", 0.0, 0.0)
    overruns.record("one", 2.0, 0.0)
    assert overruns.charges(0.0)["one"] == 0.0


def test_an_overtaken_server_starts_again_and_its_charge_decays():
    overruns = measured(one=0.0, other=0.0)
    overruns.record("one", 0.5, 0.0, anew=True)
    assert overruns.charges(0.0)["one"] == 0.5
    assert overruns.charges(HALF_LIFE_S)["one"] == pytest.approx(0.25)
    assert "one" not in overruns.charges(FORGET_AFTER_S + 1)
    for _ in range(KEPT_STEPS):
        overruns.record("one", 0.0, HALF_LIFE_S)
    assert overruns.charges(HALF_LIFE_S)["one"] == 0.0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), times, st.floats(0.0, 1e5)), max_size=60), st.floats(0.0, 1e6))
def test_charges_and_remembered_servers_are_bounded(records, now):
    overruns = MeasuredOverruns(max_peers=3)
    for peer_id, seconds, when in sorted(records, key=lambda record: record[2]):
        overruns.record(peer_id, seconds, when)
        assert len(overruns) <= 3
    charges = overruns.charges(now)
    assert all(0.0 <= charge <= MAX_OVERRUN_S for charge in charges.values())
    assert len(charges) < 2 or min(charges.values()) == 0.0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_infinite_overruns_are_refused(seconds):
    with pytest.raises(ValueError, match="finite"):
        MeasuredOverruns().record("one", seconds, 0.0)
