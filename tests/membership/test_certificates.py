from __future__ import annotations

import secrets

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import MembershipExpired, ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import (
    MAX_CERTIFICATE_BYTES,
    MAX_LIST_BYTES,
    MAX_REVOKED,
    MEMBER_NAME,
    NUMBER_LIMIT,
    Certificate,
    Purpose,
    RevocationList,
    Signed,
    open_certificate,
    open_revocations,
    sign,
    sign_certificate,
    sign_revocations,
)
from tests.members import TestAuthority

AUTHORITY = TestAuthority(b"a" * 32)
OTHER = TestAuthority(b"b" * 32)

certificates = st.builds(
    Certificate,
    authority=st.just(AUTHORITY.public_key),
    serial=st.binary(min_size=16, max_size=16),
    name=st.from_regex(MEMBER_NAME, fullmatch=True),
    member_key=st.binary(min_size=32, max_size=32),
    expires=st.integers(0, 2**37),
)


@given(certificate=certificates)
def test_a_signed_certificate_opens_and_is_small(certificate):
    data = sign_certificate(AUTHORITY.key, certificate)
    assert len(data) <= MAX_CERTIFICATE_BYTES
    assert open_certificate(data, AUTHORITY.public_key) == certificate


@given(certificate=certificates, position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_no_changed_byte_passes(certificate, position, change):
    data = bytearray(sign_certificate(AUTHORITY.key, certificate))
    data[position % len(data)] ^= change
    with pytest.raises((ProtocolViolation, UnknownAuthority)):
        open_certificate(bytes(data), AUTHORITY.public_key)


@given(certificate=certificates)
def test_another_authority_cannot_sign_for_this_one(certificate):
    with pytest.raises(UnknownAuthority):
        open_certificate(sign_certificate(OTHER.key, certificate), AUTHORITY.public_key)
    with pytest.raises(UnknownAuthority):
        open_certificate(sign_certificate(AUTHORITY.key, certificate), OTHER.public_key)


@given(data=st.binary(max_size=2 * MAX_CERTIFICATE_BYTES))
def test_garbage_is_a_violation(data):
    with pytest.raises(ProtocolViolation):
        open_certificate(data, AUTHORITY.public_key)


def test_a_signature_for_another_purpose_does_not_make_a_certificate():
    body = msgspec.msgpack.encode(AUTHORITY.invite().certificate)
    forged = msgspec.msgpack.encode(Signed(body, sign(AUTHORITY.key, Purpose.REVOCATIONS, body)))
    with pytest.raises(UnknownAuthority):
        open_certificate(forged, AUTHORITY.public_key)


def test_names_are_those_that_the_authority_gives():
    for name in ["", "anna\n", "a" * 65, "../x", "анна", "-x"]:
        certificate = msgspec.structs.replace(AUTHORITY.invite().certificate, name=name)
        with pytest.raises(ProtocolViolation):
            open_certificate(sign_certificate(AUTHORITY.key, certificate), AUTHORITY.public_key)


@given(certificate=certificates, after=st.integers(-(2**37), 2**37))
def test_it_expires_at_its_second(certificate, after):
    if after < 0:
        certificate.require_unexpired(certificate.expires + after)
    else:
        with pytest.raises(MembershipExpired, match=r"expired .* ago: ask"):
            certificate.require_unexpired(certificate.expires + after)


serials = st.sets(st.binary(min_size=16, max_size=16), max_size=8)
numbers = st.integers(1, NUMBER_LIMIT - 1)


@given(number=numbers, revoked=serials)
def test_a_signed_list_opens(number, revoked):
    data = sign_revocations(AUTHORITY.key, number, 1, revoked)
    found = open_revocations(data, AUTHORITY.public_key)
    assert (found.number, found.revoked, found.encoded) == (number, revoked, data)


@given(number=numbers, revoked=serials, position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_no_changed_byte_of_a_list_passes(number, revoked, position, change):
    data = bytearray(sign_revocations(AUTHORITY.key, number, 1, revoked))
    data[position % len(data)] ^= change
    with pytest.raises((ProtocolViolation, UnknownAuthority)):
        open_revocations(bytes(data), AUTHORITY.public_key)


def test_the_longest_list_is_within_the_limit():
    revoked = {secrets.token_bytes(16) for _ in range(MAX_REVOKED)}
    data = sign_revocations(AUTHORITY.key, NUMBER_LIMIT - 1, 2**37, revoked)
    assert len(data) <= MAX_LIST_BYTES
    assert open_revocations(data, AUTHORITY.public_key).revoked == revoked


@pytest.mark.parametrize("serials", [[b"b" * 16, b"a" * 16], [b"a" * 16, b"a" * 16]], ids=["unordered", "twice"])
def test_a_list_has_one_encoding(serials):
    body = msgspec.msgpack.encode(RevocationList(AUTHORITY.public_key, 1, 1, serials))
    data = msgspec.msgpack.encode(Signed(body, sign(AUTHORITY.key, Purpose.REVOCATIONS, body)))
    with pytest.raises(ProtocolViolation, match="not in order"):
        open_revocations(data, AUTHORITY.public_key)


def test_another_authority_revokes_nobody_here():
    data = sign_revocations(TestAuthority().key, 7, 1, {b"a" * 16})
    with pytest.raises(UnknownAuthority):
        open_revocations(data, AUTHORITY.public_key)
