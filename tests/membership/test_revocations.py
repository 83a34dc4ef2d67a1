from __future__ import annotations

import secrets

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import Purpose, Signed, sign
from swarm.membership.revocations import (
    MAX_LIST_BYTES,
    MAX_REVOKED,
    NUMBER_LIMIT,
    RevocationList,
    open_revocations,
    sign_revocations,
)
from tests.members import TestAuthority

AUTHORITY = TestAuthority(b"a" * 32)
serials = st.sets(st.binary(min_size=16, max_size=16), max_size=8)
numbers = st.integers(1, NUMBER_LIMIT - 1)


@given(number=numbers, revoked=serials)
def test_a_signed_list_opens(number, revoked):
    data = sign_revocations(AUTHORITY.key, number, 1, revoked)
    found = open_revocations(data, AUTHORITY.public_key)
    assert (found.number, found.revoked, found.encoded) == (number, revoked, data)


@given(number=numbers, revoked=serials, position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_no_changed_byte_passes(number, revoked, position, change):
    data = bytearray(sign_revocations(AUTHORITY.key, number, 1, revoked))
    data[position % len(data)] ^= change
    with pytest.raises((ProtocolViolation, UnknownAuthority)):
        open_revocations(bytes(data), AUTHORITY.public_key)


def test_the_longest_list_is_within_the_limit():
    revoked = {secrets.token_bytes(16) for _ in range(MAX_REVOKED)}
    data = sign_revocations(AUTHORITY.key, NUMBER_LIMIT - 1, 2**37, revoked)
    assert len(data) <= MAX_LIST_BYTES
    assert open_revocations(data, AUTHORITY.public_key).revoked == revoked


def test_garbage_is_a_violation():
    for data in [b"", b"\x90", b"x" * (MAX_LIST_BYTES + 1), b"\xdd\xff\xff\xff\xff"]:
        with pytest.raises(ProtocolViolation):
            open_revocations(data, AUTHORITY.public_key)


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
