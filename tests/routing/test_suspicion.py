"""What audits make a client believe: the stated error rates hold, and leaving a bad name behind does not pay."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.suspicion import (
    FALSE_ALARMS,
    HALF_LIFE_S,
    PENALTY_S,
    QUARANTINE,
    STRANGER,
    TRUSTED,
    Agreement,
    Opinion,
    Suspicions,
)
from tests.infos import server_info

SAME, DIFFERENT, UNRELATED = (Agreement.SAME, Agreement.DIFFERENT, Agreement.UNRELATED)
results = st.sampled_from([SAME, DIFFERENT, UNRELATED])


def audits_until_quarantine(share: float, chance: random.Random, before: int = 0, most: int = 100_000) -> int | None:
    """Audits that find `share` of a server's work different, after `before` that found nothing; None if never."""
    opinion = Opinion()
    for _ in range(before):
        opinion = opinion.after(SAME, 0.0)
    for number in range(1, most + 1):
        opinion = opinion.after(DIFFERENT if chance.random() < share else SAME, 0.0)
        if opinion.is_quarantined:
            return number
    return None


def test_an_honest_server_is_quarantined_less_than_once_in_10000_audits():
    """At the stated rate of false alarms, which honest machines stay below."""
    chance = random.Random(1)
    found = [audits_until_quarantine(FALSE_ALARMS, chance, most=100_000) for _ in range(10)]
    assert sum(number is not None for number in found) <= 1


def test_liars_are_caught_within_the_stated_number_of_audits():
    """By the share of its work that is found wrong: the 95th of 100 liars, long trusted ones too."""
    chance = random.Random(2)
    most = {1.0: 3, 0.5: 13, 0.25: 32, 0.15: 65}
    for share, limit in most.items():
        found = sorted(audits_until_quarantine(share, chance, before=1000) or 10**9 for _ in range(100))
        assert found[94] <= limit, (share, found[94])


def test_single_tokens_that_differ_are_weak_evidence():
    """Twice as many as an honest mixture of experts had do no harm; a server that always has some is found."""
    chance, opinion = random.Random(3), Opinion()
    for _ in range(20_000):
        opinion = opinion.after(Agreement.DOUBTFUL if chance.random() < 0.025 else SAME, 0.0)
        assert not opinion.is_quarantined
    audits = 0
    while not opinion.is_quarantined:
        opinion, audits = opinion.after(Agreement.DOUBTFUL, 0.0), audits + 1
    assert audits <= 7
    suspicions = Suspicions()
    for peer in ("one", "other"):
        suspicions.record(peer, SAME, 0.0)
    suspicions.record("one", Agreement.DOUBTFUL, 1.0)
    assert suspicions.audit_rate("other", 0.01, 1.0) < 1, "it casts no doubt on others"


def test_one_unrelated_result_is_enough():
    opinion = Opinion()
    for _ in range(100):
        opinion = opinion.after(SAME, 0.0)
    assert opinion.log_odds == TRUSTED
    assert opinion.after(UNRELATED, 0.0).is_quarantined


@given(st.lists(st.tuples(results, st.floats(0, 1e6))), st.floats(0, 1e7))
def test_opinions_stay_in_bounds(audits, later):
    opinion, now = Opinion(), 0.0
    for result, pause in audits:
        now += pause
        opinion = opinion.after(result, now)
        assert opinion.log_odds >= TRUSTED - 1e-9
    assert 0 < opinion.probability <= 1
    assert abs(opinion.at(now + later).log_odds - STRANGER) <= abs(opinion.log_odds - STRANGER) + 1e-9
    assert opinion.agreed + opinion.differed == len(audits)


def test_evidence_fades():
    opinion = Opinion().after(UNRELATED, 0.0)
    assert opinion.at(HALF_LIFE_S / 2).log_odds > opinion.at(HALF_LIFE_S).log_odds > STRANGER
    assert abs(opinion.at(HALF_LIFE_S).log_odds - (opinion.log_odds + STRANGER) / 2) < 1e-9
    assert not opinion.at(HALF_LIFE_S).is_quarantined
    assert opinion.at(HALF_LIFE_S).probability > 0.5


def test_strangers_are_audited_more_and_cost_more():
    suspicions = Suspicions()
    for _ in range(50):
        suspicions.record("known", SAME, 0.0)
    suspicions.record("odd", DIFFERENT, 0.0)
    suspicions.record("once", SAME, 0.0)
    rates = [suspicions.audit_rate(name, 0.01, 0.0) for name in ("known", "once", "odd", "new")]
    assert 0.0099 < rates[0] < 0.0101
    assert rates == sorted(rates)
    assert 0.03 < rates[1] < 0.1
    assert rates[2] > 0.9
    assert rates[3] == 1.0
    assert suspicions.audit_rate("odd", 0.0, 0.0) == suspicions.audit_rate("new", 0.0, 0.0) == 0.0
    costs = suspicions.penalties(["known", "new", "odd"], 0.0)
    assert 0 < costs["known"] < costs["new"] < costs["odd"] < PENALTY_S
    assert suspicions.quarantined(0.0) == frozenset()


def test_witnesses_are_those_of_which_good_is_known_and_new_ones_in_turn():
    """So a crowd of new names is never asked twice in one audit while others are known."""
    suspicions, chance = Suspicions(), random.Random(3)
    for name in ("good", "better"):
        suspicions.record(name, SAME, 0.0)
    suspicions.record("odd", DIFFERENT, 0.0)
    suspicions.record("liar", UNRELATED, 0.0)
    rates = {"good": 1.0, "better": 2.0, "odd": 9.0, "liar": 9.0, "new": 3.0, "newer": 4.0}
    servers = [server_info(0, 4, name, throughput=rate) for name, rate in rates.items()]
    firsts = Counter[str]()
    for _ in range(1000):
        asked = [one.peer_id for one in suspicions.witnesses(servers, chance, 0.0)]
        assert sorted(asked) == ["better", "good", "new", "newer", "odd"]
        assert {"good", "better"} <= set(asked[:3])
        firsts[asked[0]] += 1
    assert 400 < firsts["newer"] < 600
    assert firsts["newer"] + firsts["good"] + firsts["better"] == 1000
    assert abs(firsts["good"] - firsts["better"]) < 100


def test_a_new_name_is_no_gain():
    """A liar that is caught and comes back under another name is worth less to routes than one that was honest."""
    suspicions = Suspicions()
    for _ in range(12):
        suspicions.record("honest", SAME, 0.0)
    suspicions.record("liar", UNRELATED, 0.0)
    costs = suspicions.penalties(["honest", "whitewashed"], 0.0)
    assert suspicions.quarantined(0.0) == {"liar"}
    assert costs["whitewashed"] > 5 * costs["honest"]


def test_new_names_are_believed_as_much_as_those_before_deserved():
    """Liars that come back again and again make all new names cost more; honest ones make them cost less."""

    def cost(suspicions: Suspicions) -> float:
        return suspicions.penalties(["new"], 0.0)["new"]

    lied, honest, usual = Suspicions(), Suspicions(), cost(Suspicions())
    for number in range(40):
        lied.record(f"{number}", UNRELATED, 0.0)
        honest.record(f"{number}", SAME, 0.0)
    assert cost(lied) > 5 * usual
    assert cost(honest) < usual / 3
    assert lied.of("new", 0.0).probability == cost(lied) / PENALTY_S
    for number in range(500):
        lied.record(f"late {number}", SAME, 0.0)
    assert cost(lied) < usual
    assert lied.audit_rate("new", 0.01, 0.0) == 1.0


def test_once_a_trusted_server_was_wrong_the_next_work_of_all_is_audited():
    """Each once: those that are found wrong then do not begin it again, one that has passed since does."""
    suspicions = Suspicions()
    for name in ("a", "b", "c"):
        for _ in range(20):
            suspicions.record(name, SAME, 0.0)

    def all_are_audited(names: str, now: float) -> bool:
        return all(suspicions.audit_rate(name, 0.01, now) == 1.0 for name in names)

    suspicions.record("new", UNRELATED, 5.0)  # of which nothing was known
    assert not all_are_audited("a", 5.0)
    suspicions.record("a", DIFFERENT, 10.0)
    assert all_are_audited("bc", 20.0)
    suspicions.record("b", UNRELATED, 30.0)
    suspicions.record("c", SAME, 40.0)
    assert suspicions.audit_rate("c", 0.01, 40.0) < 0.02
    suspicions.record("c", DIFFERENT, 50.0)
    suspicions.record("d", SAME, 45.0)
    assert all_are_audited("d", 60.0)
    assert suspicions.audit_rate("d", 0.0, 60.0) == 0.0


def test_few_opinions_are_kept_and_the_bad_ones_longest():
    suspicions = Suspicions(max_peers=3)
    suspicions.record("liar", UNRELATED, 0.0)
    for number in range(5):
        suspicions.record(f"honest {number}", SAME, 0.0)
    assert len(suspicions) == 3
    assert suspicions.quarantined(0.0) == {"liar"}
    for number in range(5):
        suspicions.record(f"liar {number}", UNRELATED, 0.0)
    assert len(suspicions) == 3
    assert not suspicions.of("liar", 0.0).is_quarantined
    assert suspicions.of("liar 4", 0.0).log_odds >= QUARANTINE
