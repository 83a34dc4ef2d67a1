"""What the authority of a private swarm signs: certificates, and the list of those that are revoked.

A certificate is the authority's statement that the owner of a key is a member of the private swarm until a given day.
A certificate is not a secret. A member proves that the certificate is its own with a signature by the key that it names
(`swarm.membership.membership`). Every signature is made for one purpose, so that none can be shown as another.

The list of revoked certificates is numbered; peers keep the one with the highest number. Any peer that has the newest
list may pass it on, because only the authority can make one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import MembershipExpired, ProtocolViolation, UnknownAuthority

KEY_BYTES = 32
"""Bytes of a private key, and of a public one."""

SIGNATURE_BYTES = 64
_PREFIX = b"swarm private swarm 1\x00"


class Purpose(StrEnum):
    """What a signature is for; the first two are the authority's, the others a member's."""

    CERTIFICATE = "certificate"
    REVOCATIONS = "revocations"
    DIALER = "stream, by the peer that opens it"
    ACCEPTOR = "stream, by the peer that accepts it"
    REQUEST = "request of the DHT"
    RESPONSE = "response of the DHT"


def sign(key: Ed25519PrivateKey, purpose: Purpose, data: bytes) -> bytes:
    """The signature of data for a purpose."""
    return key.sign(_message(purpose, data))


def is_valid(public_key: bytes, purpose: Purpose, data: bytes, signature: bytes) -> bool:
    """Whether a signature of data was made for this purpose with the key that belongs to `public_key`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _message(purpose, data))
    except (InvalidSignature, ValueError):  # ValueError: no such key, or a signature of another length
        return False
    return True


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The public key that belongs to a private one."""
    return key.public_key().public_bytes_raw()


def _message(purpose: Purpose, data: bytes) -> bytes:
    return _PREFIX + purpose.encode() + b"\x00" + data


SERIAL_BYTES = 16
MAX_CERTIFICATE_BYTES = 512
MEMBER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Serial = Annotated[bytes, msgspec.Meta(min_length=SERIAL_BYTES, max_length=SERIAL_BYTES)]
UnixTime = Annotated[int, msgspec.Meta(ge=0, le=2**37)]


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Bytes with the signature of exactly these bytes, so that nothing depends on how they would be encoded again."""

    body: bytes
    signature: Signature


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What the authority signs.

    Attributes:
        authority: the authority's public key.
        serial: names this certificate in a list of revocations.
        name: the member's name, as the authority knows it.
        member_key: the member's public key.
        expires: Unix time in seconds.
    """

    authority: Key
    serial: Serial
    name: Annotated[str, msgspec.Meta(pattern=rf"\A{MEMBER_NAME.pattern}\Z")]
    member_key: Key
    expires: UnixTime

    def describe(self) -> str:
        """The name, and the day until which it holds."""
        return f"{self.name}, until {datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d}"

    def require_unexpired(self, now: float) -> None:
        """Raise `MembershipExpired` from its last second on."""
        if now >= self.expires:
            raise MembershipExpired(
                f"the membership of {self.name} expired {_duration(now - self.expires)} ago: ask the person who runs "
                "the swarm for a new invite"
            )


_encoder = msgspec.msgpack.Encoder()
_signed_decoder = msgspec.msgpack.Decoder(Signed)
_certificate_decoder = msgspec.msgpack.Decoder(Certificate)


def sign_certificate(authority: Ed25519PrivateKey, certificate: Certificate) -> bytes:
    """The encoded certificate with the authority's signature, at most `MAX_CERTIFICATE_BYTES` long."""
    body = _encoder.encode(certificate)
    return _encoder.encode(Signed(body, sign(authority, Purpose.CERTIFICATE, body)))


def open_certificate(data: bytes, authority: bytes) -> Certificate:
    """Decode a certificate and verify that this authority signed it; whether it still holds is not checked.

    Args:
        authority: public key of the authority.

    Raises:
        ProtocolViolation: it is not a certificate.
        UnknownAuthority: it is the certificate of another authority.
    """
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise ProtocolViolation(
            f"a certificate of {len(data)} bytes is too large; at most {MAX_CERTIFICATE_BYTES} are allowed"
        )
    try:
        signed = _signed_decoder.decode(data)
        certificate = _certificate_decoder.decode(signed.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a certificate: {error}") from None
    if certificate.authority != authority or not is_valid(
        authority, Purpose.CERTIFICATE, signed.body, signed.signature
    ):
        raise UnknownAuthority(
            "the certificate was not signed by this swarm's authority: ask the person who runs the swarm for an invite"
        )
    return certificate


def _duration(seconds: float) -> str:
    days = int(seconds // 86400)
    if days >= 1:
        return f"{days} day{'s' if days > 1 else ''}"
    return f"{int(seconds // 3600)} h" if seconds >= 3600 else f"{int(seconds)} s"


MAX_REVOKED = 4096
"""Certificates in a list. Expired ones are left out, so this limits revocations per month, not in all."""

MAX_LIST_BYTES = 80 * 1024
NUMBER_LIMIT = 2**31

Number = Annotated[int, msgspec.Meta(ge=1, lt=NUMBER_LIMIT)]


class RevocationList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The revoked certificates, as the authority signs them.

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
