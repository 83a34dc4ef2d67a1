"""This peer's membership: its own certificate, the newest revocations it has seen, and what it asks of other peers.

A proof is a signature, by the key of a certificate, of a statement: the peer that makes it, the peer it is for, and a
nonce from each side. libp2p has authenticated the peer ids, so the receiver cannot pass the proof off as its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.common.files.atomic_file import replace_file
from swarm.errors import MembershipNotProven, MembershipRevoked, ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import (
    MAX_LIST_BYTES,
    Certificate,
    Purpose,
    Revocations,
    is_valid,
    open_certificate,
    open_revocations,
    sign,
)
from swarm.membership.invite import Invite

logger = logging.getLogger(__name__)

NONCE_BYTES = 32
MAX_KNOWN_CERTIFICATES = 1024
"""Certificates whose signature need not be verified again."""


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """What a proof of membership signs, besides its `Purpose`.

    Attributes:
        speaker, listener: ids of the peer that proves its membership and of the peer that verifies it.
        certificate: the speaker's, as it is sent.
        nonces: the listener's, then the speaker's.
        content: what else is signed: the number of the newest revocations, or a digest of a message.
    """

    speaker: str
    listener: str
    certificate: bytes
    nonces: tuple[bytes, bytes]
    content: Annotated[bytes, msgspec.Meta(max_length=64)]


class Membership:
    """What a peer needs to prove that it is a member, and to judge others. Used by one event loop.

    Args:
        invite: this peer's.
        store: file that keeps the newest revocations for the next start; None keeps them in memory.
        now: returns the Unix time in seconds.
    """

    def __init__(self, invite: Invite, store: Path | None = None, now: Callable[[], float] = time.time) -> None:
        self.invite = invite
        self.revocations = Revocations()
        self._store = store
        self._now = now
        self._key = Ed25519PrivateKey.from_private_bytes(invite.private_key)
        self._known: dict[bytes, Certificate] = {}
        if store is not None:
            self.revocations = _read_store(store, invite.authority)

    @property
    def certificate(self) -> bytes:
        """This peer's certificate, as it is sent."""
        return self.invite.encoded_certificate

    def require_own(self) -> None:
        """Raise `MembershipExpired` or `MembershipRevoked` if this peer's own certificate is no longer valid."""
        self.require_valid(self.invite.certificate)

    def require_valid(self, certificate: Certificate) -> None:
        """Raise `MembershipExpired` or `MembershipRevoked` if a certificate of this authority is not valid now."""
        certificate.require_unexpired(self._now())
        if certificate.serial in self.revocations.revoked:
            raise MembershipRevoked(
                f"the membership of {certificate.name} was revoked: ask the person who runs the swarm"
            )

    def judge(self, data: bytes) -> Certificate:
        """Decode another peer's certificate and require that it is valid now.

        Raises `ProtocolViolation`, `UnknownAuthority`, `MembershipExpired` or `MembershipRevoked`.
        """
        certificate = self._known.get(data)
        if certificate is None:
            certificate = open_certificate(data, self.invite.authority)
            if len(self._known) >= MAX_KNOWN_CERTIFICATES:
                del self._known[next(iter(self._known))]
            self._known[data] = certificate
        self.require_valid(certificate)
        return certificate

    def prove(self, purpose: Purpose, statement: Statement) -> bytes:
        """Sign a statement of this peer."""
        return sign(self._key, purpose, msgspec.msgpack.encode(statement))

    def verify(self, purpose: Purpose, statement: Statement, signature: bytes) -> Certificate:
        """Verify a peer's proof of membership; returns its certificate.

        Raises what `judge` does, and `MembershipNotProven` if the signature is of another statement or by another key.
        """
        certificate = self.judge(statement.certificate)
        if not is_valid(certificate.member_key, purpose, msgspec.msgpack.encode(statement), signature):
            raise MembershipNotProven(
                f"peer …{statement.speaker[-6:]} showed the certificate of {certificate.name}, but did not prove that "
                "it is its own"
            )
        return certificate

    def learn(self, data: bytes) -> bool:
        """Take a list of revocations from another peer. Returns whether it is newer than the one known before.

        Raises `ProtocolViolation` or `UnknownAuthority` if it is not this authority's list.
        """
        found = open_revocations(data, self.invite.authority)
        if found.number <= self.revocations.number:
            return False
        self.revocations = found
        logger.info("Revocations: list %d, with %d members' certificates", found.number, len(found.revoked))
        if self._store is not None:
            _write_store(self._store, data)
        return True


def _read_store(path: Path, authority: bytes) -> Revocations:
    try:
        with path.open("rb") as file:
            return open_revocations(file.read(MAX_LIST_BYTES + 1), authority)
    except FileNotFoundError:
        return Revocations()
    except (OSError, ProtocolViolation, UnknownAuthority) as error:
        logger.warning("%s cannot be used, so this peer begins without a list of revocations: %s", path, error)
        return Revocations()


def _write_store(path: Path, data: bytes) -> None:
    """Keep a list for the next start. A peer that cannot write the file goes on without it."""
    try:
        replace_file(path, data)
    except OSError as error:
        logger.warning("The newest revocations cannot be kept in %s: %s", path, error.strerror)
