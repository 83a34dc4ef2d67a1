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
    RecordProblem,
    key_bytes,
    owner_of,
    subkey_of,
)
from tests.transport.dht.hostile import NOW, Anywhere, owner_name, private_key, signed


class Counting(Anywhere):
    """Counts what is looked at closely."""

    def __init__(self) -> None:
        self.checks = 0

    def check(self, key: bytes, owner: str, payload: bytes) -> RecordProblem | None:
        self.checks += 1
        return super().check(key, owner, payload)


def check(record: Record) -> Accepted | RecordProblem:
    return RecordChecker(Anywhere(), now=lambda: NOW).check(record)


RECORD = signed()
SUBKEY = subkey_of(private_key(0))


def test_a_record_says_what_its_owner_said():
    assert check(RECORD) == Accepted(owner_name(0), b"payload")
    assert RECORD.key == key_bytes("key")
    assert len(RECORD.key) == KEY_BYTES
    assert owner_of(RECORD.subkey) == owner_name(0)
    assert isinstance(check(signed(payload=bytes(MAX_PAYLOAD_BYTES))), Accepted)
    assert check(signed(payload=bytes(MAX_PAYLOAD_BYTES + 1))) is RecordProblem.MALFORMED
    assert check(signed(payload=b"bad")) is RecordProblem.MALFORMED  # which the rules of the swarm refuse


def test_a_changed_record():
    for changes, refusal in [
        ({"key": key_bytes("another")}, RecordProblem.SIGNATURE),
        ({"key": b"short"}, RecordProblem.MALFORMED),
        ({"expires": NOW + 61}, RecordProblem.SIGNATURE),
        ({"expires": NOW - 1}, RecordProblem.LIFETIME),
        ({"expires": NOW + MAX_LIFETIME_S + 1}, RecordProblem.LIFETIME),
        ({"expires": math.nan}, RecordProblem.LIFETIME),
        ({"subkey": subkey_of(private_key(1))}, RecordProblem.SIGNATURE),
        ({"value": RECORD.value + b" "}, RecordProblem.MALFORMED),
        ({"value": bytes(MAX_RECORD_BYTES)}, RecordProblem.MALFORMED),
        ({"value": b"[signature:" * 500}, RecordProblem.MALFORMED),
    ]:
        verdict = check(dataclasses.replace(RECORD, **changes))
        assert verdict == refusal if refusal is not None else isinstance(verdict, Accepted)


def test_a_signature_is_written_in_one_way():
    value, signature = RECORD.value.split(b"[signature:")
    raw = base64.b64decode(signature[:-1])
    for spelled in (signature[:-1] + b"\n]", b" " + signature, base64.b64encode(raw + b"x") + b"]", b"]"):
        verdict = check(dataclasses.replace(RECORD, value=value + b"[signature:" + spelled))
        assert verdict in (RecordProblem.MALFORMED, RecordProblem.SIGNATURE)


def spellings() -> list[bytes]:
    """Other subkeys with the same public key."""
    key = SUBKEY[len(b"[owner:") : -1]
    return [
        b"[owner:" + key + b" a comment]",
        b"[owner:" + key + b"\n]",
        SUBKEY + b" ",
        SUBKEY + subkey_of(private_key(1)),
        SUBKEY[:-2] + b"]",
        b"[owner:]",
        b"[owner:ssh-ed25519 AAAA]",
        b"[owner:" + bytes(5000) + b"]",
    ]


def test_an_owner_has_one_subkey():
    for subkey in spellings():
        assert owner_of(SUBKEY) == owner_name(0)
        assert owner_of(subkey) is None
        assert check(dataclasses.replace(RECORD, subkey=subkey)) is RecordProblem.MALFORMED


@pytest.mark.parametrize(("bits", "exponent"), [(1024, 65537), (2048, 3), (8192, 65537)])
def test_a_key_that_is_too_weak_or_too_slow(bits, exponent, monkeypatch):
    numbers = rsa.generate_private_key(65537, 2048).public_key().public_numbers()
    modulus = (1 << (bits - 1)) | (numbers.n >> max(0, 2048 - bits + 1)) | 1
    public = RSAPublicKey(rsa.RSAPublicNumbers(exponent, modulus).public_key())
    assert owner_of(b"[owner:" + public.to_bytes() + b"]") is None


@given(st.binary(max_size=24), st.binary(max_size=60), st.binary(max_size=60), st.floats())
@settings(deadline=None)
def test_garbage_from_the_network_is_refused_without_an_exception(key, subkey, value, expires):
    assert isinstance(check(Record(key, subkey, value, expires)), RecordProblem)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_record_is_refused(data):
    field = data.draw(st.sampled_from(["key", "subkey", "value"]))
    content = bytearray(getattr(RECORD, field))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert isinstance(check(dataclasses.replace(RECORD, **{field: bytes(content)})), RecordProblem)


def test_a_signature_is_verified_once(monkeypatch):
    rules = Counting()
    checker = RecordChecker(rules, now=lambda: NOW)
    for _ in range(3):
        assert isinstance(checker.check(RECORD), Accepted)
    assert rules.checks == 1
    late = RecordChecker(rules, now=iter([NOW, NOW + 61]).__next__)
    assert isinstance(late.check(RECORD), Accepted)
    assert late.check(RECORD) is RecordProblem.LIFETIME  # what was right is not right for ever


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
