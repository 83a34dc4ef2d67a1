from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.memory.peer_standing import ESTABLISHED_AFTER_S, ESTABLISHED_TOKENS, PeerStanding, standing


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def established(peers: PeerStanding, clock: Clock, *names: str) -> None:
    for name in names:
        peers.note_served(name, ESTABLISHED_TOKENS)
    clock.now += ESTABLISHED_AFTER_S
    for name in names:
        peers.note_served(name, 1)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_standing_grows_with_time_and_use_and_needs_both(age, later, tokens, more):
    assert 0 <= standing(age, tokens) <= standing(age + later, tokens + more) <= 1
    assert standing(age, 0) == standing(0, tokens) == 0
    assert standing(ESTABLISHED_AFTER_S, ESTABLISHED_TOKENS) == 1


def test_a_peer_that_nobody_knows_has_none():
    peers = PeerStanding(Clock())
    assert peers("stranger") == 0
    assert len(peers) == 0  # asking remembers nothing


def test_the_share_grows_from_small_to_full():
    clock = Clock()
    peers = PeerStanding(clock, new_share=0.1)
    peers.note_served("peer", ESTABLISHED_TOKENS)
    shares = []
    for _ in range(5):
        shares.append(peers.kept_share("peer", 0.75))
        clock.now += ESTABLISHED_AFTER_S / 4
    assert shares == pytest.approx([0.1, 0.2625, 0.425, 0.5875, 0.75])
    assert peers.kept_share("stranger", 0.05) == 0.05  # never more than one of full standing


def test_a_violation_begins_it_anew():
    clock = Clock()
    peers = PeerStanding(clock)
    established(peers, clock, "one", "other")
    assert (peers("one"), peers("other")) == (1, 1)
    peers.note_violation("one")
    peers.note_violation("stranger")
    assert (peers("one"), peers("other")) == (0, 1)


def test_a_flood_of_new_peers_pushes_out_new_peers_only():
    clock = Clock()
    peers = PeerStanding(clock, max_peers=10)
    established(peers, clock, "old")
    peers.note_served("new", 1)
    for number in range(100):
        peers.note_served(f"identity {number}", 10 * ESTABLISHED_TOKENS)
    assert len(peers) == 11
    assert peers("old") == 1
    clock.now += ESTABLISHED_AFTER_S
    assert peers("new") == 0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 20_000), st.floats(0, 5000)), max_size=60))
def test_the_table_is_bounded_and_standing_stays_within_bounds(acts):
    clock = Clock()
    peers = PeerStanding(clock, max_peers=3)
    for peer, tokens, seconds in acts:
        peers.note_served(peer, tokens)
        clock.now += seconds
        assert len(peers) <= 6
        assert all(0 <= peers(one) <= 1 for one in "abcdefgh")
