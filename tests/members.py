"""Members of a private swarm for tests."""

from __future__ import annotations

import secrets
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.membership.certificates import SERIAL_BYTES, Certificate, public_bytes, sign_certificate, sign_revocations
from swarm.membership.invite import Invite


class TestAuthority:
    """An authority in memory: makes invites, and lists of revocations with growing numbers.

    Attributes:
        revoked: serials that the next list names.
    """

    __test__ = False

    def __init__(self, seed: bytes | None = None) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(seed or secrets.token_bytes(32))
        self.public_key = public_bytes(self.key)
        self.number = 0
        self.revoked: set[bytes] = set()

    def invite(self, name: str = "anna", lifetime_s: float = 3600.0, now: float | None = None) -> Invite:
        expires = int((time.time() if now is None else now) + lifetime_s)
        key = Ed25519PrivateKey.generate()
        certificate = Certificate(self.public_key, secrets.token_bytes(SERIAL_BYTES), name, public_bytes(key), expires)
        return Invite(self.public_key, sign_certificate(self.key, certificate), certificate, key.private_bytes_raw())

    def revoke(self, *invites: Invite) -> bytes:
        """The next list, which revokes these invites and all that were revoked before."""
        self.revoked |= {invite.certificate.serial for invite in invites}
        self.number += 1
        return sign_revocations(self.key, self.number, int(time.time()), self.revoked)
