"""Who is asked to leave, against the rules written out for each session."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarm.server.memory.leaving import (
    IDLE_AFTER_S,
    LITTLE_STANDING,
    RESPECTED_IDLE_AFTER_S,
    HeldCache,
    choose_leaving,
)

SHARE = 100


def chosen(held: list[HeldCache], needed: int, peer: str = "me", wanted: int = SHARE, **standing: float) -> list:
    """Every peer keeps `SHARE` tokens and has full standing unless said otherwise."""
    return choose_leaving(held, peer, needed, wanted, lambda peer: SHARE, lambda peer: standing.get(peer, 1.0))


def holding(*sessions: tuple[str, int, float]) -> list[HeldCache]:
    """Sessions by number: peer, tokens, seconds since they were used."""
    return [HeldCache(number, *one) for number, one in enumerate(sessions)]


def test_the_idlest_session_leaves_first_and_no_more_than_have_to():
    held = holding(("a", 40, 90), ("b", 40, 300), ("c", 40, 100), ("d", 40, 10))
    assert chosen(held, 30) == [1]
    assert chosen(held, 41) == [1, 2]
    assert chosen(held, 120) == [1, 2, 0]


def test_nobody_leaves_if_that_is_not_enough():
    held = holding(("a", 40, 1000), ("b", 40, 1))
    assert chosen(held, 41) == []
    assert chosen(held, 0) == []


def test_a_session_that_is_used_stays_unless_its_peer_holds_more_than_its_share():
    used = holding(("a", SHARE, 0), ("b", SHARE, 1))
    assert chosen(used, 10) == []
    assert chosen(holding(("a", SHARE, 0), ("a", 1, 1)), 1) == [1]


def test_what_is_on_loan_is_given_back_only_to_those_within_their_share():
    held = holding(("a", SHARE + 1, 0))
    assert chosen(held, 10, wanted=SHARE) == [0]
    assert chosen(held, 10, wanted=SHARE + 1) == []


def test_a_peer_gives_back_only_until_it_is_within_its_share():
    held = holding(("a", 60, 3), ("a", 60, 2), ("a", 60, 1))
    assert chosen(held, 100) == [0, 1]
    assert chosen(held, 121) == []  # 60 are its share


def test_a_new_peer_gives_way_to_one_of_full_standing_and_not_the_other_way_round():
    held = holding(("new", 50, 0), ("old", 50, 0))
    assert chosen(held, 10, new=0.0) == [0]
    assert chosen(held, 10, peer="newer", new=0.0, newer=0.9) == []


def test_a_peer_of_standing_may_think_for_longer():
    held = holding(("old", 50, IDLE_AFTER_S + 1))
    assert chosen(held, 10) == [0]
    assert chosen(held, 10, peer="new", new=0.0) == []
    held = holding(("old", 50, RESPECTED_IDLE_AFTER_S + 1))
    assert chosen(held, 10, peer="new", new=0.0) == [0]


PEERS = st.sampled_from("abcd")
HELD = st.lists(st.tuples(PEERS, st.integers(0, 150), st.floats(0, 1000)), max_size=8)


@given(
    HELD,
    PEERS,
    st.integers(0, 300),
    st.integers(0, 300),
    st.fixed_dictionaries({one: st.floats(0, 1) for one in "abcd"}),
)
def test_whoever_leaves_has_a_reason_to_and_makes_enough_room(sessions, peer, needed, wanted, standings):
    held = holding(*sessions)
    leaving = choose_leaving(held, peer, needed, wanted, lambda peer: SHARE, standings.__getitem__)
    assert len(set(leaving)) == len(leaving)
    if not leaving:
        return
    freed = [held[number] for number in leaving]
    assert sum(one.tokens for one in freed) >= needed > sum(one.tokens for one in freed[:-1])
    totals = Counter()
    for one in held:
        totals[one.peer] += one.tokens
    for one in freed:
        patience = RESPECTED_IDLE_AFTER_S if standings[one.peer] > standings[peer] else IDLE_AFTER_S
        idle = one.idle_s > patience
        on_loan = wanted <= SHARE and one.peer != peer and totals[one.peer] > SHARE
        gives_way = one.peer != peer and standings[peer] >= 1 and standings[one.peer] < LITTLE_STANDING
        assert idle or on_loan or gives_way
        totals[one.peer] -= one.tokens


@given(HELD, st.integers(1, 300), st.integers(0, 100))
def test_equals_never_push_each_other_out_in_turn(sessions, needed, wanted):
    """Whoever was asked to leave and comes back at once cannot have anybody leave who is in use."""
    held = [HeldCache(one.session, one.peer, one.tokens, min(one.idle_s, IDLE_AFTER_S)) for one in holding(*sessions)]
    leaving = [held[number] for number in chosen(held, needed, peer="newcomer", wanted=wanted)]
    left = [one for one in held if one not in leaving]
    after = [*left, HeldCache("new", "newcomer", wanted, 0.0)]
    for one in leaving:
        again = one.tokens + sum(other.tokens for other in left if other.peer == one.peer)
        asked = chosen(after, one.tokens, peer=one.peer, wanted=again)
        assert "new" not in asked
