"""Which servers may push to each other after some of them were caught."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.peer_health import DISTRUST_S, MAX_PARTNERS, PARTNER_PENALTY_S, LinkTrust

peers = st.sampled_from("abcdef")
pairs = st.lists(st.tuples(peers, peers).filter(lambda pair: pair[0] != pair[1]), max_size=12)


@given(pairs, st.floats(0, DISTRUST_S * 0.9))
def test_it_is_what_it_says(caught, now):
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
def test_a_liar_gets_no_further_than_two_neighbors(attempts):
    """However it chooses them, and whoever else is caught meanwhile."""
    trust, caught = LinkTrust(), set()
    for _, other in attempts:
        if other != "a" and trust.trusts("a", other, 0.0):
            trust.distrust("a", other, 0.0)
            caught.add(other)
    assert len(caught) <= MAX_PARTNERS


def test_it_remembers_so_many_links():
    trust = LinkTrust(max_links=2)
    for other in "bcd":
        trust.distrust("x" + other, other, 0.0)
    assert [trust.trusts("x" + other, other, 0.0) for other in "bcd"] == [True, False, False]
