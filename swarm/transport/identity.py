"""A peer's identity: one RSA key that names the peer in libp2p and signs what it announces to the DHT.

Because both are the same key, nobody can announce anything in another peer's name: see `swarm.dht.validation`.
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
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from swarm.errors import IdentityError


@dataclass(frozen=True)
class Identity:
    """Attributes:
    path: the key file that the libp2p daemon reads.
    private_key: the same key, for signing.
    peer_id: base58 name that follows from the key.
    """

    path: Path
    private_key: RSAPrivateKey
    peer_id: str


def load_or_create(path: Path) -> Identity:
    """Read the identity file, or write a new one (readable by its owner only).

    Raises `IdentityError` if it cannot be written or holds no RSA key.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Created empty with tight rights first, so that the key is at no time readable by others.
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
            raise ValueError("the key is no RSA key")
        return Identity(path, private_key, PeerID.from_identity(data).to_base58())
    except Exception as error:  # protobuf, DER and key errors have no common base
        raise IdentityError(
            f"the identity file {path} holds no libp2p RSA key ({error}); name another file to create a new identity"
        ) from None


def peer_id_of(public_key_ssh: bytes) -> str:
    """The base58 peer id that belongs to an RSA public key in OpenSSH format. Raises ValueError if it is none."""
    try:
        key = serialization.load_ssh_public_key(public_key_ssh)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("the key is no RSA key")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    digest = multihash.encode(hashlib.sha256(encoded).digest(), multihash.coerce_code("sha2-256"))
    return str(PeerID(digest).to_base58())
