from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.standing import ESTABLISHED_AFTER_S, FORGET_AFTER_S, SENIOR_SHARE, Standing

FLOOD = [f"stranger {number}" for number in range(500)]
LATER = ESTABLISHED_AFTER_S + 1


def standing(salt: bytes = b"salt", **options: int) -> Standing:
    return Standing(salt, **options)


def test_where_there_is_room_everybody_stays():
    assert sorted(standing().select(FLOOD, 500, 0.0)) == sorted(FLOOD)
    assert standing().select([], 5, 0.0) == []


def test_who_has_long_been_there_stays_the_oldest_first():
    one = standing()
    one.note_seen("old", 0.0)
    one.note_seen("older", -5.0)
    for owner in FLOOD:
        one.note_seen(owner, LATER - 1)
    assert one.select([*FLOOD, "old", "older"], 4, LATER)[:2] == ["older", "old"]


def test_who_served_stays_before_all_others():
    one = standing()
    one.note_seen("old", 0.0)
    one.note_seen("new", LATER - 1)
    one.note_served("new", LATER)
    assert one.select(["old", "new", *FLOOD], 2, LATER)[0] == "new"
    one.note_failed("new")
    assert one.select(["old", "new"], 2, LATER)[0] == "old"


def test_a_service_long_ago_is_no_merit():
    one = standing()
    for when in (0.0, FORGET_AFTER_S, 2 * FORGET_AFTER_S):
        one.note_seen("b", when - 1)
        one.note_seen("a", when)
    one.note_served("a", 0.0)
    assert one.select(["a", "b"], 2, 1.0)[0] == "a"
    assert one.select(["a", "b"], 2, 2 * FORGET_AFTER_S)[0] == "b"


def test_who_was_away_for_long_is_a_newcomer():
    one = standing()
    one.note_seen("a", 0.0)
    one.note_seen("b", 1.0)
    one.note_seen("b", FORGET_AFTER_S - 1)
    one.note_seen("a", FORGET_AFTER_S + 10)
    assert one.select(["a", "b"], 2, FORGET_AFTER_S + 10)[0] == "b"


def test_merit_cannot_be_bought_before_one_is_known():
    one = standing()
    one.note_served("a", 0.0)
    assert len(one) == 0


def test_newcomers_have_a_quarter_of_the_places_even_where_all_are_old():
    one = standing()
    for number, owner in enumerate(FLOOD):
        one.note_seen(owner, number / 1000)
    picks = {standing(bytes([salt])).select(["honest"], 1, 0.0)[0] for salt in range(3)}
    assert picks == {"honest"}
    # By the lottery of different peers, whoever is new wins somewhere.
    wins = 0
    for salt in range(40):
        other = standing(bytes([salt]))
        for number, owner in enumerate(FLOOD):
            other.note_seen(owner, number / 1000)
        chosen = other.select([*FLOOD, "honest"], 400, LATER)
        assert set(FLOOD[: int(400 * SENIOR_SHARE)]) <= set(chosen)
        wins += "honest" in chosen
    assert 5 < wins < 35  # 100 places for 201


def test_networks_get_places_in_turn():
    groups = dict.fromkeys(FLOOD, "10.0.0.0/24") | {"honest": "192.0.2.0/24"}
    for salt in range(20):
        assert "honest" in standing(bytes([salt])).select([*FLOOD, "honest"], 4, 0.0, groups)


def test_the_lottery_is_the_same_until_it_is_held_elsewhere():
    one = standing()
    assert one.select(FLOOD, 10, 0.0) == one.select(reversed(FLOOD), 10, 5.0)
    assert one.select(FLOOD, 10, 0.0) != standing(b"another").select(FLOOD, 10, 0.0)


@given(st.lists(st.tuples(st.sampled_from(["seen", "served", "failed"]), st.integers(0, 60)), max_size=300), st.data())
@settings(deadline=None)
def test_memory_is_bounded_and_keeps_who_is_established(events, data):
    one = standing(max_remembered=16)
    for number in range(4):
        one.note_seen(f"honest {number}", number / 10)
    now = LATER
    for number in range(4):
        one.note_seen(f"honest {number}", now)
    for kind, number in events:
        now += data.draw(st.floats(0, 0.5))
        if kind == "seen":
            one.note_seen(f"stranger {number}", now)
        elif kind == "served":
            one.note_served(f"stranger {number}", now)
        else:
            one.note_failed(f"stranger {number}")
        assert len(one) <= 16
    honest = [f"honest {number}" for number in range(4)]
    strangers = [f"stranger {number}" for number in range(61)]
    served = {name for name in strangers if one._known.get(name) and one._known[name].served_at > 0}
    chosen = one.select([*strangers, *honest], 32 + len(served), now)
    assert set(honest) <= set(chosen)


def test_who_is_no_newcomer():
    standing = Standing(b"salt")
    for owner in ("old", "young", "served"):
        standing.note_seen(owner, 0.0 if owner == "old" else ESTABLISHED_AFTER_S)
    standing.note_served("served", ESTABLISHED_AFTER_S)
    known = {
        owner for owner in ("old", "young", "served", "unknown") if standing.is_established(owner, ESTABLISHED_AFTER_S)
    }
    assert known == {"old", "served"}
