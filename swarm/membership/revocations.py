"""The list of revoked certificates. The authority numbers and signs it; peers keep the one with the highest number.

Any peer that has the newest list may pass it on, because only the authority can make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import Key, Purpose, Serial, Signed, UnixTime, is_valid, public_bytes, sign

MAX_REVOKED = 4096
"""Certificates in a list. Expired ones are left out, so this limits revocations per month, not in all."""

MAX_LIST_BYTES = 80 * 1024
NUMBER_LIMIT = 2**31

Number = Annotated[int, msgspec.Meta(ge=1, lt=NUMBER_LIMIT)]


class RevocationList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What the authority signs.

    Attributes:
        authority: the authority's public key.
        number: grows with every change.
        issued: Unix time in seconds.
        revoked: serials of certificates, ascending.
    """

    authority: Key
    number: Number
    issued: UnixTime
    revoked: Annotated[list[Serial], msgspec.Meta(max_length=MAX_REVOKED)]


@dataclass(frozen=True)
class Revocations:
    """A list as a peer keeps it: number 0, with nothing encoded, until the first one is seen."""

    number: int = 0
    revoked: frozenset[bytes] = frozenset()
    encoded: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_signed_decoder = msgspec.msgpack.Decoder(Signed)
_list_decoder = msgspec.msgpack.Decoder(RevocationList)


def sign_revocations(authority: Ed25519PrivateKey, number: int, issued: int, revoked: set[bytes]) -> bytes:
    """The encoded list with the authority's signature. `revoked` has at most `MAX_REVOKED` serials."""
    body = _encoder.encode(RevocationList(public_bytes(authority), number, issued, sorted(revoked)))
    return _encoder.encode(Signed(body, sign(authority, Purpose.REVOCATIONS, body)))


def open_revocations(data: bytes, authority: bytes) -> Revocations:
    """Decode a list and verify that this authority signed it.

    Raises:
        ProtocolViolation: it is not a list.
        UnknownAuthority: it is the list of another authority.
    """
    if len(data) > MAX_LIST_BYTES:
        raise ProtocolViolation(f"a list of revocations of {len(data)} bytes is too large; at most {MAX_LIST_BYTES}")
    try:
        signed = _signed_decoder.decode(data)
        content = _list_decoder.decode(signed.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a list of revocations: {error}") from None
    if content.authority != authority or not is_valid(authority, Purpose.REVOCATIONS, signed.body, signed.signature):
        raise UnknownAuthority("the list of revocations was not signed by this swarm's authority")
    if any(first >= second for first, second in pairwise(content.revoked)):
        raise ProtocolViolation("the serials of a list of revocations are not in order")
    return Revocations(content.number, frozenset(content.revoked), data)
