from __future__ import annotations

import dataclasses

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo, ServerInfo, ServerState, Span
from swarm.dht import model_records
from swarm.dht.server_records import MAX_LIFETIME_S, MAX_RECORD_BYTES, encode_announcement
from swarm.dht.validation import AnnouncementValidator, owner_of
from swarm.transport.identity import peer_id_of

NOW = 1_000_000.0
KEY = b"key of the DHT"


@dataclasses.dataclass(frozen=True)
class Person:
    """A peer with the validators of a real one."""

    peer_id: str
    subkey: bytes
    validator: CompositeValidator

    def info(self, **changes: object) -> ServerInfo:
        info = ServerInfo(
            peer_id=self.peer_id,
            span=Span(0, 1),
            state=ServerState.ONLINE,
            throughput=1.0,
            cache_tokens_free=0,
            revision="main",
            digests=("0123456789ab",),
            compute_dtype="float32",
            quantization="none",
            version="1",
        )
        return dataclasses.replace(info, **changes)

    def record(self, value: object = None, subkey: object = None, expires: float = NOW + 60) -> DHTRecord:
        """What this person stores, signed by it if the subkey carries its key."""
        value = encode_announcement(self.info()) if value is None else value
        subkey = self.subkey if subkey is None else subkey
        record = DHTRecord(KEY, MSGPackSerializer.dumps(subkey), MSGPackSerializer.dumps(value), expires)
        return dataclasses.replace(record, value=self.validator.sign_value(record))


def person() -> Person:
    key = RSAPrivateKey()
    signatures = RSASignatureValidator(key)
    validator = CompositeValidator([signatures, AnnouncementValidator(now=lambda: NOW)])
    return Person(peer_id_of(key.get_public_key().to_bytes()), signatures.local_public_key, validator)


ALICE, MALLORY, READER = person(), person(), person()


def accepted(record: DHTRecord) -> bool:
    return READER.validator.validate(record)


def test_an_announcement_of_its_owner_is_accepted_by_everybody():
    record = ALICE.record()
    assert accepted(record)
    assert ALICE.validator.validate(record)
    assert MSGPackSerializer.loads(READER.validator.strip_value(record)) == encode_announcement(ALICE.info())


def test_nobody_announces_in_another_peers_name():
    assert accepted(MALLORY.record(encode_announcement(MALLORY.info())))
    assert not accepted(MALLORY.record(encode_announcement(ALICE.info())))


def test_nobody_writes_under_another_peers_key():
    assert not accepted(MALLORY.record(encode_announcement(ALICE.info()), subkey=ALICE.subkey))


def test_an_unsigned_announcement():
    signed = ALICE.record()
    unsigned = MSGPackSerializer.dumps(encode_announcement(ALICE.info()))
    assert signed.value.startswith(unsigned)
    assert not accepted(dataclasses.replace(signed, value=unsigned))


@pytest.mark.parametrize("subkey", ["Alice", b"", b"no key at all", 7])
def test_a_subkey_without_a_key(subkey):
    assert not accepted(MALLORY.record(subkey=subkey))


def test_a_record_without_a_subkey():
    """hivemind marks plain values by an empty subkey."""
    assert not accepted(DHTRecord(KEY, b"", MSGPackSerializer.dumps(encode_announcement(ALICE.info())), NOW + 60))


def test_a_changed_value_key_or_lifetime_breaks_the_signature():
    record = ALICE.record()
    other = ALICE.record(encode_announcement(ALICE.info(span=Span(1, 2))))
    signature = record.value[len(MSGPackSerializer.dumps(encode_announcement(ALICE.info()))) :]
    forged = MSGPackSerializer.dumps(encode_announcement(ALICE.info(throughput=1e6))) + signature
    assert accepted(other)
    for changes in ({"value": forged}, {"value": other.value[:-10]}, {"key": b"other"}, {"expiration_time": NOW + 61}):
        assert not accepted(dataclasses.replace(record, **changes)), changes


@pytest.mark.parametrize(
    ("ahead", "expected"), [(1, True), (MAX_LIFETIME_S - 1, True), (MAX_LIFETIME_S + 1, False), (float("inf"), False)]
)
def test_an_announcement_may_not_live_for_ever(ahead, expected):
    assert accepted(ALICE.record(expires=NOW + ahead)) is expected


@pytest.mark.parametrize(
    "value",
    [b"", b"garbage", "text", 7, [1, 2], {"peer_id": "somebody"}, 1.5],
    ids=str,
)
def test_a_signed_value_that_is_no_announcement(value):
    assert not accepted(ALICE.record(value))


def test_a_model_is_named_by_its_owner():
    model = ModelInfo("model", 12, "main")
    assert accepted(ALICE.record(model_records.encode_model(ALICE.peer_id, model)))
    assert not accepted(MALLORY.record(model_records.encode_model(ALICE.peer_id, model)))
    assert not accepted(MALLORY.record(model_records.encode_model(ALICE.peer_id, model), subkey=ALICE.subkey))
    assert not accepted(
        ALICE.record(model_records.encode_model(ALICE.peer_id, model), expires=NOW + MAX_LIFETIME_S + 1)
    )
    assert not accepted(ALICE.record(model_records.encode_model(ALICE.peer_id, ModelInfo("", 12, "main"))))


def test_a_signed_value_that_is_not_even_msgpack():
    for raw in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000, b"\xc7\x01\x05\x00", b"\xc8\xff\xff\x53"):
        record = DHTRecord(KEY, MSGPackSerializer.dumps(ALICE.subkey), raw, NOW + 60)
        record = dataclasses.replace(record, value=ALICE.validator.sign_value(record))
        assert not accepted(record), raw[:10]


def test_an_oversized_record():
    assert not accepted(ALICE.record(b"x" * (MAX_RECORD_BYTES + 1)))


@given(st.binary(max_size=60), st.binary(max_size=60))
@settings(deadline=None)
def test_garbage_from_the_network_is_refused_without_an_exception(subkey, value):
    assert not AnnouncementValidator(now=lambda: NOW).validate(DHTRecord(KEY, subkey, value, NOW))


def test_the_owner_is_the_peer_of_exactly_one_key():
    assert owner_of(ALICE.subkey) == ALICE.peer_id
    for subkey in (
        b"",
        b"[owner:]",
        b"[owner:ssh-rsa ]",
        b"[owner:ssh-rsa AAAA]",
        b"[owner:ssh-ed25519 AAAA]",
        ALICE.subkey[:-1],
        ALICE.subkey + b" ",
        b"x" + ALICE.subkey,
        ALICE.subkey + MALLORY.subkey,
        ALICE.subkey[:-2] + b"]",
    ):
        assert owner_of(subkey) is None, subkey


@given(st.binary(max_size=80))
@settings(deadline=None)
def test_garbage_belongs_to_nobody(garbage):
    assert owner_of(b"[owner:ssh-rsa " + garbage + b"]") is None


def test_two_validators_of_one_node_are_merged():
    assert AnnouncementValidator().merge_with(AnnouncementValidator())
    assert not AnnouncementValidator().merge_with(RSASignatureValidator(RSAPrivateKey()))
