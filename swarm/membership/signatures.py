"""Ed25519 signatures, each made for one purpose, so that none can be shown as another."""

from __future__ import annotations

from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

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
