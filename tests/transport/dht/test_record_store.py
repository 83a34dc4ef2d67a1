from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.record_store import ESTABLISHED_AFTER_S, RecordStore, StoreLimits, best_first, share_room
from swarm.transport.dht.records import MAX_RECORD_BYTES, key_bytes
from tests.transport.dht.hostile import NOW, unsigned

KEY, OTHER = key_bytes("key"), key_bytes("other")
SMALL = StoreLimits(owner_records=3, key_records=8, records=20)


def store(limits: StoreLimits | None = None) -> RecordStore:
    return RecordStore(limits)


def put(node: RecordStore, owner: str, key: bytes = KEY, expires: float = NOW + 60, now: float = NOW, **more) -> bool:
    return node.store(unsigned(owner, key, expires=expires, **more), owner, now)


def owners(node: RecordStore, key: bytes = KEY, now: float = NOW) -> set[str]:
    return {record.subkey[len(b"[owner:") : -1].decode() for record in node.find(key, now)}


def test_what_is_stored_is_found_until_it_is_over():
    node = store()
    assert put(node, "a")
    assert put(node, "b", expires=NOW + 30)
    assert put(node, "a", OTHER)
    assert owners(node) == {"a", "b"}
    assert owners(node, OTHER) == {"a"}
    assert owners(node, key_bytes("nothing")) == set()
    assert len(node) == 3
    assert owners(node, now=NOW + 31) == {"a"}
    assert len(node) == 2
    assert owners(node, now=NOW + 61) == owners(node, OTHER, now=NOW + 61) == set()
    assert (len(node), node.size_bytes) == (0, 0)


def test_of_two_records_of_an_owner_the_one_that_expires_later_stays():
    node = store()
    assert put(node, "a", expires=NOW + 50, size=10)
    assert not put(node, "a", expires=NOW + 50, size=20)
    assert not put(node, "a", expires=NOW + 40, size=20)
    assert [len(record.value) for record in node.find(KEY, NOW)] == [10]
    assert put(node, "a", expires=NOW + 51, size=20)
    assert [len(record.value) for record in node.find(KEY, NOW)] == [20]
    assert (len(node), node.size_bytes) == (1, 20 + len(b"[owner:a]"))


def test_what_is_over_or_too_large_is_not_stored():
    for expires in [NOW - 1, float("nan"), float("inf")]:
        assert not put(store(), "a", expires=expires)
    assert not put(store(), "a", size=MAX_RECORD_BYTES)


def test_of_an_owner_with_too_many_records_the_first_to_expire_gives_way():
    node = store(SMALL)
    keys = [key_bytes(str(number)) for number in range(5)]
    for number, key in enumerate(keys):
        assert put(node, "a", key, expires=NOW + 100 - number)
    # The newest stays though it expires first.
    assert [len(node.find(key, NOW)) for key in keys] == [1, 1, 0, 0, 1]
    assert put(node, "b", keys[0])


def test_room_for_honest_records_is_made_of_expired_ones_first():
    node = store(SMALL)
    for number in range(SMALL.key_records):
        assert put(node, f"brief {number}", expires=NOW + 1)
    for number in range(SMALL.key_records):
        assert put(node, f"new {number}", now=NOW + 2)
    assert owners(node, now=NOW + 2) == {f"new {number}" for number in range(SMALL.key_records)}


def honest_and_flood(honest_group: str, flood_group: str) -> set[str]:
    node = store(SMALL)
    for number in range(200):
        record = unsigned(f"stranger {number}", KEY)
        node.store(record, f"stranger {number}", NOW, flood_group)
    node.store(unsigned("honest", KEY), "honest", NOW, honest_group)
    for number in range(200, 400):
        node.store(unsigned(f"stranger {number}", KEY), f"stranger {number}", NOW, flood_group)
    return owners(node)


def test_a_newcomer_from_another_network_is_kept_in_a_flood():
    assert "honest" in honest_and_flood("192.0.2.0/24", "10.0.0.0/24")
    assert len(honest_and_flood("", "")) == SMALL.key_records


hostile = st.tuples(
    st.sampled_from(["key", "other", "third"]),
    st.integers(0, 60),  # identity
    st.floats(-10, 700) | st.sampled_from([float("nan"), float("inf")]),  # lifetime
    st.integers(0, MAX_RECORD_BYTES + 5),
    st.floats(0, 3),  # seconds until then
)


@given(st.lists(hostile, max_size=150))
@settings(deadline=None)
def test_no_sequence_of_stores_hides_who_has_long_been_there_or_exceeds_a_limit(attacks):
    node = store(SMALL)
    honest = ["ann", "ben", "cem"]
    for when in (NOW - ESTABLISHED_AFTER_S - 1, NOW - 300, NOW):
        for owner in honest:
            for name in ("key", "other"):
                assert put(node, owner, key_bytes(name), expires=when + 400, now=when)
    now = NOW
    for name, number, lifetime, size, later in attacks:
        now = min(now + later, NOW + 390)
        owner = f"stranger {number}"
        kept = put(node, owner, key_bytes(name), expires=now + lifetime, now=now, size=size)
        assert not kept or owner in owners(node, key_bytes(name), now)
        assert len(node) <= SMALL.records
        assert node.size_bytes <= SMALL.records * MAX_RECORD_BYTES
        for one in ("key", "other", "third"):
            assert len(node.find(key_bytes(one), now)) <= SMALL.key_records
        assert sum(owner in owners(node, key_bytes(one), now) for one in ("key", "other", "third")) <= 3
        for one in honest:
            assert one in owners(node, now=now)
            assert one in owners(node, OTHER, now=now)
    assert node.size_bytes == sum(one.size_bytes for kept in node._by_key.values() for one in kept.values())
    assert not any(node.find(key_bytes(one), NOW + 10_000) for one in ("key", "other", "third"))
    assert (len(node), node.size_bytes, node._owners) == (0, 0, {})


def test_of_a_full_node_a_few_records_give_way_at_a_time():
    """Dropping many at once held up everything else that a node does, for as long as it takes to rank all owners."""
    node = store(StoreLimits(owner_records=3, key_records=8, records=1000))
    for number in range(50):
        assert put(node, f"old {number}", key_bytes(str(number)), now=NOW - ESTABLISHED_AFTER_S - 1, expires=NOW + 500)
    for number in range(3000):
        before = len(node)
        put(node, f"stranger {number}", key_bytes(str(number)))
        assert before - 3 <= len(node) <= 1000
    assert len(node) > 990
    for number in range(50):
        assert f"old {number}" in owners(node, key_bytes(str(number)))


OWNERS = {f"owner {number}": NOW - 10.0 * number for number in range(100)}
"""A hundred owners, of which 40 are established, and when they became known."""


def test_those_that_served_come_first_then_established_ones_and_new_ones_have_a_quarter():
    kept = best_first(OWNERS, 20, NOW, OWNERS, served=["owner 3", "owner 70"])
    assert kept[:2] == ["owner 70", "owner 3"]
    assert kept[2:15] == [f"owner {number}" for number in range(99, 86, -1)]
    assert sorted(best_first(OWNERS, 1000, NOW, OWNERS)) == sorted(OWNERS)
    assert best_first(OWNERS, 1, NOW, OWNERS, served=["owner 3"]) == ["owner 3"]
    crowd = {f"old {number}": NOW - ESTABLISHED_AFTER_S for number in range(1000)} | {"new": NOW}
    kept = best_first(crowd, 20, NOW, crowd, {"new": "192.0.2.0/24"})
    assert "new" in kept  # the first of its network, among those for whom a quarter is left


def test_networks_get_the_places_of_new_owners_in_turn():
    networks = {owner: str(min(number, 5)) for number, owner in enumerate(OWNERS)}
    kept = best_first(OWNERS, 10, NOW, {}, networks)
    assert {networks[one] for one in kept[:6]} == set("012345")


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 3000))
def test_room_is_shared_fairly(sizes, room):
    shares = share_room(sizes, room)
    assert sum(shares) <= room
    assert all(share <= size for share, size in zip(shares, sizes, strict=True))
    if sum(sizes) <= room:
        assert shares == sizes
    # Who got less than it needs got no less than anybody else, but for what does not divide.
    cut = [share for share, size in zip(shares, sizes, strict=True) if share < size]
    assert not cut or min(cut) >= max(shares) - 1 - len(sizes)
