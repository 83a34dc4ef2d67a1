from __future__ import annotations

import base64
import dataclasses
import math

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.utils.crypto import RSAPublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.transport.dht.records import (
    KEY_BYTES,
    MAX_LIFETIME_S,
    MAX_PAYLOAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_VERIFIED,
    Accepted,
    Record,
    RecordChecker,
    Refusal,
    key_bytes,
    owner_of,
    subkey_of,
)
from tests.transport.dht.hostile import NOW, Anywhere, owner_name, private_key, signed


class Counting(Anywhere):
    """Counts what is looked at closely."""

    def __init__(self) -> None:
        self.checks = 0

    def check(self, key: bytes, owner: str, payload: bytes) -> Refusal | None:
        self.checks += 1
        return super().check(key, owner, payload)


def check(record: Record) -> Accepted | Refusal:
    return RecordChecker(Anywhere(), now=lambda: NOW).check(record)


RECORD = signed()
SUBKEY = subkey_of(private_key(0))


def test_a_record_says_what_its_owner_said():
    assert check(RECORD) == Accepted(owner_name(0), b"payload")
    assert RECORD.key == key_bytes("key")
    assert len(RECORD.key) == KEY_BYTES
    assert owner_of(RECORD.subkey) == owner_name(0)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        pytest.param({"key": key_bytes("another")}, Refusal.SIGNATURE, id="another key"),
        pytest.param({"key": b"short"}, Refusal.MALFORMED, id="a short key"),
        pytest.param({"expires": NOW + 61}, Refusal.SIGNATURE, id="another expiry"),
        pytest.param({"expires": NOW - 1}, Refusal.LIFETIME, id="over"),
        pytest.param({"expires": NOW + MAX_LIFETIME_S + 1}, Refusal.LIFETIME, id="lives too long"),
        pytest.param({"expires": math.inf}, Refusal.LIFETIME, id="never expires"),
        pytest.param({"expires": math.nan}, Refusal.LIFETIME, id="expiry is no number"),
        pytest.param({"subkey": subkey_of(private_key(1))}, Refusal.SIGNATURE, id="another owner"),
        pytest.param({"value": RECORD.value + b" "}, Refusal.MALFORMED, id="a space at the end"),
        pytest.param({"value": signed(payload=b"other").value}, None, id="another payload, signed"),
        pytest.param({"value": b""}, Refusal.MALFORMED, id="no value"),
        pytest.param({"value": bytes(MAX_RECORD_BYTES)}, Refusal.MALFORMED, id="zeros"),
        pytest.param({"value": b"[signature:" * 500}, Refusal.MALFORMED, id="many signatures"),
    ],
)
def test_a_changed_record(changes, refusal):
    verdict = check(dataclasses.replace(RECORD, **changes))
    assert verdict == refusal if refusal is not None else isinstance(verdict, Accepted)


def test_what_breaks_the_rules_of_the_swarm():
    assert check(signed(payload=b"bad")) is Refusal.MALFORMED


def test_the_largest_payload():
    assert isinstance(check(signed(payload=bytes(MAX_PAYLOAD_BYTES))), Accepted)
    assert check(signed(payload=bytes(MAX_PAYLOAD_BYTES + 1))) is Refusal.MALFORMED


def test_a_signature_is_written_in_one_way():
    value, signature = RECORD.value.split(b"[signature:")
    raw = base64.b64decode(signature[:-1])
    for spelled in (signature[:-1] + b"\n]", b" " + signature, base64.b64encode(raw + b"x") + b"]", b"]"):
        verdict = check(dataclasses.replace(RECORD, value=value + b"[signature:" + spelled))
        assert verdict in (Refusal.MALFORMED, Refusal.SIGNATURE)


def spellings() -> list[bytes]:
    """Other subkeys with the same public key."""
    key = SUBKEY[len(b"[owner:") : -1]
    kind, encoded = key.split(b" ")
    return [
        b"[owner:" + key + b" a comment]",
        b"[owner:" + key + b" ]",
        b"[owner: " + key + b"]",
        b"[owner:" + kind + b"  " + encoded + b"]",
        b"[owner:" + kind + b" " + encoded + b"=]",
        b"[owner:" + key + b"\n]",
        b"x" + SUBKEY,
        SUBKEY + b" ",
        SUBKEY[:-1],
        SUBKEY + subkey_of(private_key(1)),
        SUBKEY[:-2] + b"]",
        b"",
        b"[owner:]",
        b"[owner:ssh-rsa ]",
        b"[owner:ssh-rsa AAAA]",
        b"[owner:ssh-ed25519 AAAA]",
        b"[owner:" + bytes(5000) + b"]",
    ]


@pytest.mark.parametrize("subkey", spellings(), ids=range(len(spellings())))
def test_an_owner_has_one_subkey(subkey):
    assert owner_of(SUBKEY) == owner_name(0)
    assert owner_of(subkey) is None
    assert check(dataclasses.replace(RECORD, subkey=subkey)) is Refusal.MALFORMED


@pytest.mark.parametrize(("bits", "exponent"), [(1024, 65537), (2048, 3), (8192, 65537)])
def test_a_key_that_is_too_weak_or_too_slow(bits, exponent, monkeypatch):
    numbers = rsa.generate_private_key(65537, 2048).public_key().public_numbers()
    modulus = (1 << (bits - 1)) | (numbers.n >> max(0, 2048 - bits + 1)) | 1
    public = RSAPublicKey(rsa.RSAPublicNumbers(exponent, modulus).public_key())
    assert owner_of(b"[owner:" + public.to_bytes() + b"]") is None


@given(st.binary(max_size=80))
@settings(deadline=None)
def test_garbage_belongs_to_nobody(garbage):
    assert owner_of(b"[owner:ssh-rsa " + garbage + b"]") is None


@given(st.binary(max_size=24), st.binary(max_size=60), st.binary(max_size=60), st.floats())
@settings(deadline=None)
def test_garbage_from_the_network_is_refused_without_an_exception(key, subkey, value, expires):
    assert isinstance(check(Record(key, subkey, value, expires)), Refusal)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_record_is_refused(data):
    field = data.draw(st.sampled_from(["key", "subkey", "value"]))
    content = bytearray(getattr(RECORD, field))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert isinstance(check(dataclasses.replace(RECORD, **{field: bytes(content)})), Refusal)


def test_a_signature_is_verified_once(monkeypatch):
    rules = Counting()
    checker = RecordChecker(rules, now=lambda: NOW)
    for _ in range(3):
        assert isinstance(checker.check(RECORD), Accepted)
    assert rules.checks == 1
    late = RecordChecker(rules, now=iter([NOW, NOW + 61]).__next__)
    assert isinstance(late.check(RECORD), Accepted)
    assert late.check(RECORD) is Refusal.LIFETIME  # what was right is not right for ever


def test_records_that_are_over_are_not_remembered():
    clock = [NOW]
    checker = RecordChecker(Counting(), now=lambda: clock[0])
    for number in range(20):
        checker.check(signed(name=f"key {number}", expires=NOW + 10 + number))
    assert len(checker._verified) == 20
    clock[0] = NOW + 25.5
    assert isinstance(checker.check(signed(name="a newer one", expires=clock[0] + 30)), Accepted)
    assert sorted(expires for _, expires in checker._verified.values()) == [
        *(NOW + 26 + n for n in range(4)),
        NOW + 55.5,
    ]


def test_what_was_verified_is_forgotten_in_time(monkeypatch):
    monkeypatch.setattr("swarm.transport.dht.records.MAX_VERIFIED", 3)
    rules = Counting()
    checker = RecordChecker(rules, now=lambda: NOW)
    for number in range(5):
        checker.check(signed(name=f"key {number}"))
    assert len(checker._verified) == 3
    assert MAX_VERIFIED > 1000
    checker.check(signed(payload=b"bad"))
    assert len(checker._verified) == 3  # what is refused is not remembered


def test_keys_are_made_from_names():
    assert len({key_bytes(name) for name in ("a", "b", "a/1", "")}) == 4
