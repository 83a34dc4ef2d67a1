"""A peer's identity: one RSA key that names the peer in libp2p and signs what it announces to the DHT.

Because both uses share one key, a peer cannot announce anything in the name of another peer: see
`swarm.dht.validation`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import multihash
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from swarm.errors import IdentityError

KEY_BITS = range(2048, 4096 + 1)
"""Sizes of a peer's RSA key: libp2p takes no smaller ones, and larger ones only make verifying slower."""


class Signature(NamedTuple):
    """A signature in base64, and the signer's public key in OpenSSH format."""

    public_key: bytes
    signature: bytes


@dataclass(frozen=True)
class Identity:
    """A peer's key, the file from which the libp2p daemon reads it, and the peer id (base58) derived from it."""

    path: Path
    private_key: RSAPrivateKey
    peer_id: str

    def sign(self, data: bytes) -> Signature:
        """The peer's signature of some bytes, which should say what they are for."""
        return Signature(self.private_key.get_public_key().to_bytes(), self.private_key.sign(data))


def load_or_create(path: Path) -> Identity:
    """Read the identity file, or create it (readable by its owner only).

    Raises `IdentityError` if it cannot be written or does not hold an RSA key.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Created empty with restricted permissions first, so that other users can never read the key.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            P2P.generate_identity(str(path))
        data = path.read_bytes()
    except OSError as error:
        raise IdentityError(f"the identity file {path} cannot be used: {error.strerror or error}") from error
    try:
        stored = crypto_pb2.PrivateKey.FromString(data)
        private_key = RSAPrivateKey.__new__(RSAPrivateKey)
        private_key.__setstate__({"_private_key": stored.data})
        if stored.key_type != crypto_pb2.RSA:
            raise ValueError("the key is not an RSA key")
        return Identity(path, private_key, PeerID.from_identity(data).to_base58())
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(
            f"the identity file {path} does not hold a libp2p RSA key ({error}); give the path of a new file to create "
            "a new identity"
        ) from None


@dataclass(frozen=True)
class PublicKey:
    """Another peer's key, and its peer id."""

    peer_id: str
    key: RSAPublicKey

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(encoded: bytes) -> PublicKey:
        """The key in OpenSSH format, without a comment. Raises `ValueError` if it is not a peer's RSA key."""
        key = _load_rsa_key(encoded)
        public, numbers = RSAPublicKey(key), key.public_numbers()
        if public.to_bytes() != encoded or numbers.n.bit_length() not in KEY_BITS or numbers.e != 65537:
            raise ValueError("the key is not one that peers have")
        return PublicKey(_peer_id(key), public)

    def is_signed(self, data: bytes, signature: bytes) -> bool:
        """Whether its owner has signed these bytes."""
        return bool(self.key.verify(data, signature))


def peer_id_of(public_key_ssh: bytes) -> str:
    """The base58 peer id of an RSA public key in OpenSSH format. Raises `ValueError` if it is not such a key."""
    return _peer_id(_load_rsa_key(public_key_ssh))


def _load_rsa_key(public_key_ssh: bytes) -> rsa.RSAPublicKey:
    try:
        key = serialization.load_ssh_public_key(public_key_ssh)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("the key is not an RSA key")
    return key


def _peer_id(key: rsa.RSAPublicKey) -> str:
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    digest = multihash.encode(hashlib.sha256(encoded).digest(), multihash.coerce_code("sha2-256"))
    return str(PeerID(digest).to_base58())
