"""A certificate: the authority's statement that the owner of a key is a member of the private swarm until a given day.

A certificate is not a secret. A member proves that the certificate is its own with a signature by the key that it names
(`swarm.membership.membership`).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import MembershipExpired, ProtocolViolation, UnknownAuthority
from swarm.membership.signatures import KEY_BYTES, SIGNATURE_BYTES, Purpose, is_valid, sign

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
