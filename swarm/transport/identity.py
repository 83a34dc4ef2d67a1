"""A peer's identity: one RSA key that names the peer in libp2p and signs what it announces to the DHT.

Because both uses share one key, a peer cannot announce anything in the name of another peer: see
`swarm.dht.validation`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import multihash
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from swarm.errors import IdentityError


@dataclass(frozen=True)
class Identity:
    """A peer's key, the file from which the libp2p daemon reads it, and the peer id (base58) derived from it."""

    path: Path
    private_key: RSAPrivateKey
    peer_id: str


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


def peer_id_of(public_key_ssh: bytes) -> str:
    """The base58 peer id of an RSA public key in OpenSSH format. Raises `ValueError` if it is not such a key."""
    try:
        key = serialization.load_ssh_public_key(public_key_ssh)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("the key is not an RSA key")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    digest = multihash.encode(hashlib.sha256(encoded).digest(), multihash.coerce_code("sha2-256"))
    return str(PeerID(digest).to_base58())
