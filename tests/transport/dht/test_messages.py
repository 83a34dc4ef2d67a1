from __future__ import annotations

import contextlib

import msgspec
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation
from swarm.transport.dht import messages
from swarm.transport.dht.record_store import StoreLimits
from swarm.transport.dht.records import MAX_RECORD_BYTES, Record, key_bytes
from tests.transport.dht.hostile import NOW, dictionary, signed, unsigned
from tests.transport.dht.test_routing_table import PEERS

KEY = key_bytes("key")
NODE = dht_pb2.NodeInfo(node_id=b"n" * 20)


def found(value: bytes) -> list[Record]:
    return messages.records_found(
        KEY, dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=NOW)
    )


def test_what_is_asked_to_be_stored_is_what_arrives():
    records = [signed(), signed(1), unsigned("a", KEY)]
    request = dht_pb2.StoreRequest.FromString(messages.store_request(records, NODE).SerializeToString())
    assert messages.stored_records(request) == records
    assert list(request.in_cache) == [False] * 3
    assert request.peer == NODE


def test_requests_to_store_that_are_no_requests():
    good = messages.store_request([signed()], NODE)
    for field, value in (
        ("keys", KEY),
        ("values", b""),
        ("in_cache", True),
        ("subkeys", b""),
        ("expiration_time", 1.0),
    ):
        request = dht_pb2.StoreRequest()
        request.CopyFrom(good)
        getattr(request, field).append(value)
        with pytest.raises(ProtocolViolation, match="equal numbers"):
            messages.stored_records(request)
    with pytest.raises(ProtocolViolation, match="equal numbers"):
        messages.stored_records(messages.store_request([signed()] * (messages.MAX_RECORDS_STORED + 1), NODE))


def test_a_subkey_that_is_none():
    for subkey in [
        b"",
        b"\xa1a",
        MSGPackSerializer.dumps((1, 2)),
    ]:
        request = messages.store_request([signed(), signed()], NODE)
        request.subkeys[0] = subkey
        assert messages.stored_records(request) == [None, signed()]


def test_requests_to_find():
    assert messages.sought_keys(messages.find_request([KEY], NODE)) == [KEY]
    for keys in ([KEY] * (messages.MAX_KEYS_ANSWERED + 1), [b"short"], [KEY, b""], [KEY + b"x"]):
        with pytest.raises(ProtocolViolation, match="at most"):
            messages.sought_keys(messages.find_request(keys, NODE))


def test_what_is_answered_is_what_is_read():
    records = [signed(expires=NOW + 60), signed(1, expires=NOW + 70)]
    [some, none] = messages.found_results([records, []])
    assert found(some.value) == records
    assert some.expiration_time == NOW + 70
    assert messages.records_found(KEY, none) == []


def test_hivemind_reads_our_answers():
    [result] = messages.found_results([[unsigned("a", KEY, expires=NOW * 10_000)]])
    value = MSGPackSerializer.loads(result.value)
    assert isinstance(value, DictionaryDHTValue)
    assert list(value.data) == [b"[owner:a]"]


def test_a_full_node_answers_within_what_the_transport_carries():
    """All keys full of records as large as they may be, and names of nodes."""
    limits = StoreLimits()
    full = [unsigned(f"owner {number}", KEY, size=MAX_RECORD_BYTES - 20) for number in range(limits.key_records)]
    [alone] = messages.found_results([full])
    assert len(found(alone.value)) == limits.key_records  # one key is always told whole
    results = messages.found_results([full] * messages.MAX_KEYS_ANSWERED)
    for result in results:
        messages.add_neighbors(result, PEERS[:20])
    assert len(dht_pb2.FindResponse(results=results, peer=NODE).SerializeToString()) < 4 * 1024 * 1024 - 64 * 1024
    shares = [len(found(result.value)) for result in results]
    assert min(shares) >= max(shares) - 1 > 0


def test_answers_that_are_no_dictionaries():
    for value in [
        b"",
        dictionary(maxsize="x"),
        dictionary(latest="x"),
        dictionary(items="x"),
        dictionary(items=[[b"a", b"b"]]),
        dictionary(items=[[b"a", "b", 1.0]]),
        dictionary(items=[[b"a", b"b", 1.0, 1]]),
        dictionary(items=[[b"a", b"b", 1.0]] * (messages.MAX_RECORDS_ANSWERED + 1)),
        dictionary(code=0x40),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, b"\x91" * 5000)),
        dictionary()[:-1],
        dictionary() + b"\x00",
    ]:
        with pytest.raises(ProtocolViolation, match="an answer of the DHT"):
            found(value)


def test_a_plain_value_is_no_answer():
    with pytest.raises(ProtocolViolation, match="plain value"):
        messages.records_found(KEY, dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=b"x", expiration_time=NOW))


def test_the_nodes_that_an_answer_names():
    result = dht_pb2.FindResult()
    messages.add_neighbors(result, PEERS[:20])
    assert messages.neighbors_named(result) == PEERS[:20]
    messages.add_neighbors(result, PEERS[20:21])
    with pytest.raises(ProtocolViolation, match="names 21 nodes"):
        messages.neighbors_named(result)
    for peer in (b"", b"x" * 65):
        with pytest.raises(ProtocolViolation, match="ids that are none"):
            messages.neighbors_named(dht_pb2.FindResult(nearest_peer_ids=[peer]))


things = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.binary(max_size=80) | st.builds(lambda a, b, c: dictionary(maxsize=a, latest=b, items=c), things, things, things)
)
@settings(deadline=None)
def test_no_answer_raises_anything_else(value):
    with contextlib.suppress(ProtocolViolation):
        assert all(isinstance(record, Record) for record in found(value))
