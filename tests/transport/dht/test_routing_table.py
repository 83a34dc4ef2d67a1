from __future__ import annotations

import hashlib

from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.routing_table import (
    BUCKET_NODES,
    MAX_SILENT_NODES,
    SILENT_S,
    WRONG_SILENT_S,
    RoutingTable,
    node_id_of,
    position,
)


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + hashlib.sha256(str(number).encode()).digest())


PEERS = [peer(number) for number in range(400)]
OWN = peer(-1)


def far_half(count: int) -> list[PeerID]:
    """Peers that share no bit of the id's beginning with ours: they have one bucket."""
    own = position(node_id_of(OWN)) >> 159
    return [one for one in PEERS if position(node_id_of(one)) >> 159 != own][:count]


def test_known_nodes_by_distance():
    table = RoutingTable(OWN)
    for one in PEERS[:30]:
        table.add(one)
    assert len(table) == 30
    for key in (b"a" * 20, b"z" * 20, node_id_of(PEERS[3])):
        expected = sorted(PEERS[:30], key=lambda one: position(node_id_of(one)) ^ position(key))
        assert table.nearest(key, 7) == expected[:7]
        assert table.nearest(key, 7, exclude=expected[0]) == expected[1:8]
    table.add(OWN)
    assert len(table) == 30
    assert PEERS[0] in table
    assert PEERS[31] not in table


def test_who_has_long_been_known_keeps_its_place_while_it_answers():
    table = RoutingTable(OWN)
    old, new = far_half(BUCKET_NODES), far_half(BUCKET_NODES + 1)[-1]
    for one in (*old, new):
        table.add(one)
    assert new not in table
    table.failed(old[1], 0.0)
    table.add(new)
    assert new in table
    assert [one in table for one in old] == [True, False, *[True] * (BUCKET_NODES - 2)]


def test_who_does_not_answer_is_left_alone_for_a_while():
    table = RoutingTable(OWN)
    one = PEERS[0]
    table.add(one)
    assert not table.is_silent(one, 0.0)
    table.failed(one, 0.0)
    assert table.is_silent(one, SILENT_S - 0.1)
    assert not table.is_silent(one, SILENT_S)  # it may have been started again
    table.failed(one, SILENT_S)
    table.answered(one)
    assert not table.is_silent(one, SILENT_S)


def test_who_answered_wrongly_is_left_alone_for_longer():
    table = RoutingTable(OWN)
    table.failed(PEERS[0], 0.0, WRONG_SILENT_S)
    table.failed(PEERS[0], 1.0)
    assert table.is_silent(PEERS[0], WRONG_SILENT_S - 1)


def test_each_bucket_names_the_node_that_was_heard_of_longest_ago():
    table = RoutingTable(OWN)
    assert table.longest_unheard() == []
    far = far_half(5)
    near = next(one for one in PEERS if one not in far_half(len(PEERS)))
    for one in (*far, near):
        table.add(one)
    assert table.longest_unheard() == [far[0], near]
    table.add(far[0])  # it asked something
    assert table.longest_unheard() == [far[1], near]
    table.answered(far[1])
    table.failed(far[2], 0.0)
    table.failed(near, 0.0)
    assert table.longest_unheard() == [far[3]]


def test_memory_is_bounded():
    table = RoutingTable(OWN)
    for number in range(MAX_SILENT_NODES + 10):
        table.failed(peer(number), 0.0)
        table.add(peer(number))
    assert len(table._silent) == MAX_SILENT_NODES
    assert len(table) <= BUCKET_NODES * 20  # a bucket for each bit that a thousand random ids share with ours


@given(st.lists(st.tuples(st.sampled_from(["add", "answered", "failed"]), st.integers(0, 99)), max_size=300))
@settings(deadline=None)
def test_strangers_never_displace_a_node_that_answers(events):
    table = RoutingTable(OWN)
    honest = far_half(5)
    for one in honest:
        table.add(one)
    strangers = [one for one in PEERS if one not in honest]
    for kind, number in events:
        if kind == "add":
            table.add(strangers[number])
        elif kind == "answered":
            table.answered(strangers[number])
        else:
            table.failed(strangers[number], 0.0)
        assert all(one in table for one in honest)
        assert all(len(bucket) <= BUCKET_NODES for bucket in table._buckets.values())
