from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.routing_table import node_id_of, position
from swarm.transport.dht.search import MAX_ASKED, MAX_FALSE_NAMES, MAX_NAMED, MAX_TARGETS, Search
from tests.transport.dht.test_routing_table import OWN, PEERS, peer

KEYS = [bytes([number]) * 20 for number in range(40)]


def distance(one, key):
    return position(node_id_of(one)) ^ position(key)


def play(search: Search, network: dict, rng: random.Random | None = None, parallel: int = 1) -> list:
    """Answer all requests from `network`: peer -> the peers that it names, None if it is not there. What was asked."""
    asked, waiting = [], []
    while True:
        while len(waiting) < parallel and (request := search.next_request()) is not None:
            waiting.append(request)
            asked.append(request)
        if not waiting:
            return asked
        request = waiting.pop((rng or random.Random(0)).randrange(len(waiting)))
        names = network.get(request.peer)
        if names is None:
            search.failed(request)
        else:
            search.answered(request, {key: names(key) if callable(names) else names for key in request.targets})


def test_all_nodes_of_a_small_swarm_are_asked_for_all_keys_in_few_requests():
    network = dict.fromkeys(PEERS[:5], PEERS[:5])
    search = Search(KEYS[:32], PEERS[:1], 16, OWN)
    asked = play(search, network)
    for one in PEERS[:5]:
        requests = [request for request in asked if request.peer == one]
        assert sorted(key for request in requests for key in request.targets) == KEYS[:32]
        assert len(requests) == 32 // MAX_TARGETS
    assert search.any_answered
    assert set(search.nearest(KEYS[0], 20)) == set(PEERS[:5])


def test_a_search_finds_the_nearest_nodes_of_a_large_swarm():
    def names(one):
        near = sorted(PEERS, key=lambda other: distance(other, node_id_of(one)))[:30]
        others = random.Random(str(one)).sample(PEERS, 30)
        return lambda key: sorted({*near, *others}, key=lambda other: distance(other, key))[:20]

    network = {one: names(one) for one in PEERS}
    for key in KEYS[:3]:
        search = Search([key], PEERS[:3], 8, OWN)
        asked = play(search, network, parallel=4)
        assert search.nearest(key, 8) == sorted(PEERS, key=lambda one: distance(one, key))[:8]
        assert len(asked) < 60


def test_this_peer_and_who_is_asked_already_are_not_asked():
    search = Search(KEYS[:1], [OWN, *PEERS[:2]], 8, OWN)
    first, second = search.next_request(), search.next_request()
    assert {first.peer, second.peer} == set(PEERS[:2])
    assert search.next_request() is None
    search.answered(first, {KEYS[0]: [OWN, *PEERS[:2]]})
    assert search.next_request() is None


def test_who_failed_before_is_not_asked_again_because_others_name_it():
    network = {PEERS[0]: PEERS[:4]}
    asked = play(Search(KEYS[:1], PEERS[:1], 8, OWN, is_silent=lambda one: one == PEERS[1]), network)
    assert [request.peer for request in asked[:1]] == PEERS[:1]
    assert {request.peer for request in asked} == {PEERS[0], PEERS[2], PEERS[3]}
    asked = play(Search(KEYS[:1], PEERS[:2], 8, OWN, is_silent=lambda one: one == PEERS[1]), network)
    assert PEERS[1] in {request.peer for request in asked}  # of those known, the caller has chosen


def test_nobody_answers():
    search = Search(KEYS, PEERS[:3], 8, OWN)
    assert len(play(search, {})) == 3
    assert not search.any_answered
    assert search.nearest(KEYS[0], 5) == []
    assert play(Search(KEYS, [], 8, OWN), {}) == []


def liar(key):
    """Names nodes that are not there, right beside the key."""
    rng = random.Random(key)
    fakes = sorted((peer(rng.getrandbits(60)) for _ in range(2000)), key=lambda one: distance(one, key))
    return fakes[:20]


def test_one_liar_cannot_hide_the_others_nor_keep_a_search_busy():
    honest = PEERS[:6]
    network = {one: [*honest, PEERS[7]] for one in honest} | {PEERS[7]: liar}
    search = Search(KEYS[:8], [PEERS[7], honest[0]], 4, OWN)
    asked = play(search, network, parallel=8)
    assert {request.peer for request in asked} >= set(honest[:1])
    false = [request for request in asked if request.peer not in network]
    assert len(false) <= MAX_FALSE_NAMES + 8  # and those under way when it was found out
    for key in KEYS[:8]:
        near = sorted(honest, key=lambda one: distance(one, key))[:3]
        assert set(near) <= set(search.nearest(key, 8))


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_whatever_liars_say_the_nodes_that_this_peer_knew_are_asked(seed, parallel, known, breadth):
    rng = random.Random(seed)
    honest, liars = PEERS[:known], PEERS[known : known + 4]
    invented = [peer(10_000 + rng.randrange(10**6)) for _ in range(300)]

    def lie(key):
        return [rng.choice([*invented, *liars, *honest, OWN]) for _ in range(rng.randrange(60))]

    network = dict.fromkeys(honest, honest) | dict.fromkeys(liars, lie)
    search = Search(KEYS[:5], [*liars, *honest], breadth, OWN)
    asked = play(search, network, rng, parallel)
    for key in KEYS[:5]:
        nearest = sorted(honest, key=lambda one: distance(one, key))
        own = sorted([*liars, *honest], key=lambda one: distance(one, key))[:breadth]
        for one in nearest:
            if one in own:
                assert any(request.peer == one and key in request.targets for request in asked)
    assert len(search._nodes) <= 5 * (MAX_NAMED + MAX_ASKED) + known + 4
    assert len(asked) <= 5 * (len(honest) + len(liars) + MAX_FALSE_NAMES * len(liars) + parallel)
    assert all(len(request.targets) == len(set(request.targets)) <= MAX_TARGETS for request in asked)


@pytest.mark.parametrize("liars", [1, 10])
def test_a_few_liars_that_name_each_other_cannot_use_up_what_a_search_may_learn(liars):
    """Each of them names twenty others for each key, which are there, before anybody else answers."""
    first, honest = PEERS[:liars], PEERS[100:110]
    search = Search(KEYS, [*first, honest[0]], 8, OWN)
    waiting = list(iter(search.next_request, None))
    others = [peer(10_000 + number) for number in range(liars * 100)]
    for request in sorted(waiting, key=lambda one: one.peer not in first):
        if request.peer in first:
            rng = random.Random(str(request))
            search.answered(request, {key: rng.sample(others, 20) for key in request.targets})
        else:
            search.answered(request, dict.fromkeys(request.targets, honest))
    network = dict.fromkeys(honest, honest) | dict.fromkeys(others, others[:20])
    play(search, network, parallel=8)
    for key in KEYS:
        everybody = [*first, *honest, *others]
        nearest = sorted(everybody, key=lambda one: distance(one, key))[:8]
        assert {*honest[1:]} & {*nearest} <= set(search.nearest(key, 1000))


def test_a_search_asks_so_many_nodes_for_a_target_and_no_more():
    """Each one names others that are nearer still."""
    key = KEYS[0]
    order = sorted((peer(number) for number in range(4000)), key=lambda one: distance(one, key), reverse=True)
    network = {one: order[number + 1 : number + 21] for number, one in enumerate(order)}
    search = Search([key], [order[0], *PEERS[:3]], 8, OWN)
    asked = play(search, network | dict.fromkeys(PEERS[:3], PEERS[:3]))
    assert MAX_ASKED <= len(asked) <= MAX_ASKED + 8 + 4
    assert {request.peer for request in asked} >= set(PEERS[:3])
