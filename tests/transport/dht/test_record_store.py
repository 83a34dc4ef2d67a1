from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.record_store import NETWORK_SHARE, RecordStore, StoreLimits
from swarm.transport.dht.records import MAX_RECORD_BYTES, key_bytes
from tests.transport.dht.hostile import NOW, unsigned

KEY, OTHER = key_bytes("key"), key_bytes("other")
SMALL = StoreLimits(owner_records=3, key_records=32, records=80)
OF_NETWORK = int(SMALL.key_records * NETWORK_SHARE)


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
    for number in range(OF_NETWORK):
        assert put(node, f"brief {number}", expires=NOW + 1)
    assert not put(node, "late")
    for number in range(OF_NETWORK):
        assert put(node, f"new {number}", now=NOW + 2)
    assert owners(node, now=NOW + 2) == {f"new {number}" for number in range(OF_NETWORK)}


def put_from(node: RecordStore, network: str, owner: str, key: bytes = KEY) -> bool:
    return node.store(unsigned(owner, key), owner, NOW, network)


def test_a_flood_from_one_network_leaves_room_for_others():
    node = store(SMALL)
    taken = [put_from(node, "10.0.0.0/24", f"stranger {number}") for number in range(200)]
    assert taken == [True] * OF_NETWORK + [False] * (200 - OF_NETWORK)
    assert put_from(node, "192.0.2.0/24", "honest")
    for network in "abc":
        for number in range(OF_NETWORK):
            put_from(node, network, f"{network} {number}")
    assert len(owners(node)) == SMALL.key_records
    assert not put_from(node, "192.0.2.0/24", "late")
    assert "honest" in owners(node)
    assert put(node, "honest", expires=NOW + 99)  # what is there is renewed all the same


def test_a_flood_from_one_network_takes_a_share_of_the_node():
    node = store(SMALL)
    for number in range(200):
        put_from(node, "10.0.0.0/24", f"stranger {number}", key_bytes(str(number)))
    assert len(node) == SMALL.records * NETWORK_SHARE
    assert put_from(node, "192.0.2.0/24", "honest")
    assert node.has_any_of("honest")
    assert not node.has_any_of("stranger 199")


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
    for when in (NOW - 300, NOW):
        for owner in honest:
            for name in ("key", "other"):
                assert put(node, owner, key_bytes(name), expires=when + 400, now=when)
    now = NOW
    for name, number, lifetime, size, later in attacks:
        now = min(now + later, NOW + 390)
        owner = f"stranger {number}"
        kept = put(node, owner, key_bytes(name), expires=now + lifetime, now=now, size=size)
        assert not kept or owner in owners(node, key_bytes(name), now)
        assert sum(owner.startswith("stranger") for owner in owners(node, key_bytes(name), now)) <= OF_NETWORK
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
