"""The authority of a private swarm: a file with its private key and whom it has invited. Only its owner may read it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.common.files.atomic_file import replace_file
from swarm.errors import MembershipError
from swarm.membership.certificates import (
    MAX_REVOKED,
    MEMBER_NAME,
    NUMBER_LIMIT,
    SERIAL_BYTES,
    Certificate,
    Key,
    Revocations,
    Serial,
    UnixTime,
    public_bytes,
    sign_certificate,
    sign_revocations,
)
from swarm.membership.invite import Invite

MAX_FILE_BYTES = 16 << 20
MAX_INVITES = 65536
DAY_S = 86400
MAX_DAYS = 3650
PUBLISHER_LIFETIME_S = 600
"""How long the certificate lives with which the authority itself joins the swarm to hand out a list."""


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the authority remembers of an invite. The invite itself is not kept.

    Attributes:
        expires, revoked: Unix times in seconds; `revoked` is None while it holds.
    """

    name: str
    serial: Serial
    expires: UnixTime
    revoked: UnixTime | None = None

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        if self.revoked is not None:
            return "revoked"
        return "valid" if now < self.expires else "expired"

    def is_listed(self, now: float) -> bool:
        """Whether the list of revocations has to name it; a day longer than it lives, for peers with slow clocks."""
        return self.revoked is not None and now < self.expires + DAY_S


class Authority(msgspec.Struct, forbid_unknown_fields=True):
    """The content of an authority's file.

    Attributes:
        private_key: Ed25519, raw.
        number: of the newest list of revocations; 0 before the first.
        invitations: in the order of their making.
    """

    private_key: Key
    number: Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_LIMIT)] = 0
    invitations: Annotated[list[Invitation], msgspec.Meta(max_length=MAX_INVITES)] = []

    def __repr__(self) -> str:  # without the key
        return f"Authority({self.fingerprint}, number={self.number}, {len(self.invitations)} invitations)"

    @property
    def key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.private_key)

    @property
    def fingerprint(self) -> str:
        """The public key in hex, by which people recognize the authority."""
        return public_bytes(self.key).hex()

    def revocation_list(self, now: float) -> bytes:
        """The newest list, signed. Certificates that expired a day ago are left out: they are refused anyway."""
        revoked = {one.serial for one in self.invitations if one.is_listed(now)}
        return sign_revocations(self.key, self.number, int(now), revoked)

    def require_newest(self, seen: Revocations, now: float) -> None:
        """Raise `MembershipError` if the list that peers have shows that this is an older copy of the authority's file.

        From an older copy nothing should be published: peers ignore a list whose number they know, and a list with a
        higher number would take back the revocations since.
        """
        revoked = {one.serial for one in self.invitations if one.revoked is not None}
        listed = {one.serial for one in self.invitations if one.is_listed(now)}
        is_same = seen.number == self.number
        if seen.number > self.number or not seen.revoked <= revoked or (is_same and not listed <= seen.revoked):
            raise MembershipError(
                f"this is an older copy of the authority's file, with list {self.number} of revocations: list "
                f"{seen.number}, which peers have, names others. Use the newest copy; if it is lost, make a new "
                "authority and new invites"
            )

    def publisher(self, now: float) -> Invite:
        """An invite for this process, which joins the swarm to hand out the newest list."""
        return _new_invite(self.key, secrets.token_bytes(SERIAL_BYTES), "authority", int(now) + PUBLISHER_LIFETIME_S)


def create_authority(path: Path) -> Authority:
    """Make a new authority and its file. Raises `MembershipError` if the file exists or cannot be written."""
    authority = Authority(secrets.token_bytes(32))
    with _locked_folder(path):
        if path.exists():
            raise MembershipError(f"{path} exists: it may be a swarm's authority, so it is left as it is")
        _write(path, authority)
    return authority


def read_authority(path: Path) -> Authority:
    """Read an authority's file. Raises `MembershipError`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise MembershipError(f"{path} does not exist: make an authority with `swarm members init`") from None
    except OSError as error:
        raise MembershipError(f"{path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise MembershipError(f"users other than its owner can read or change {path}: chmod 600 {path}")
    if len(data) > MAX_FILE_BYTES:
        raise MembershipError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, so it is not an authority's file")
    try:
        return msgspec.json.decode(data, type=Authority)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MembershipError(f"{path} is not the file of an authority: {error}") from None


def invite_member(path: Path, name: str, days: float, now: float) -> Invite:
    """Make an invite and note it in the file. A name may have several, one after the other or at the same time.

    Raises `MembershipError`: the name or the number of days is not valid, or the file cannot be used.
    """
    if not 0 < days <= MAX_DAYS:
        raise MembershipError(f"an invite is valid for more than 0 and at most {MAX_DAYS} days, not for {days:g}")
    if not MEMBER_NAME.fullmatch(name):
        raise MembershipError(f"{name!r} is not a valid name: use up to 64 of the characters A-Z a-z 0-9 . _ -")
    with _changed(path) as authority:
        if len(authority.invitations) >= MAX_INVITES:
            raise MembershipError(f"{path} has {MAX_INVITES} invites: make a new authority")
        serial, expires = secrets.token_bytes(SERIAL_BYTES), int(now + days * DAY_S)
        authority.invitations.append(Invitation(name, serial, expires))
        return _new_invite(authority.key, serial, name, expires)


def revoke_member(path: Path, name: str, now: float) -> int:
    """Revoke all invites of a name that still hold; returns their number. The list's number grows.

    Raises `MembershipError`: no invite of this name holds, or the file cannot be used.
    """
    with _changed(path) as authority:
        found = [one for one in authority.invitations if one.name == name and one.state(now) == "valid"]
        if not found:
            raise MembershipError(f"no invite of {name!r} is valid: `swarm members list` shows all")
        listed = sum(one.is_listed(now) for one in authority.invitations)
        if listed + len(found) > MAX_REVOKED:
            raise MembershipError(f"{MAX_REVOKED} revoked invites have not expired yet: make a new authority")
        authority.invitations = [
            msgspec.structs.replace(one, revoked=int(now)) if one in found else one for one in authority.invitations
        ]
        authority.number += 1
        return len(found)


def _new_invite(authority: Ed25519PrivateKey, serial: bytes, name: str, expires: int) -> Invite:
    key = Ed25519PrivateKey.generate()
    certificate = Certificate(public_bytes(authority), serial, name, public_bytes(key), expires)
    return Invite(certificate.authority, sign_certificate(authority, certificate), certificate, key.private_bytes_raw())


@contextmanager
def _changed(path: Path) -> Iterator[Authority]:
    """The authority of the file, which is written back at the end. Other processes cannot change it meanwhile."""
    path = path.resolve()
    with _locked_folder(path):
        authority = read_authority(path)
        yield authority
        _write(path, authority)


@contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise MembershipError(f"{path.parent} cannot be used for an authority's file: {error.strerror}") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            raise MembershipError(
                f"{path.parent} cannot be locked: {error.strerror}. Keep the authority's file on a local drive"
            ) from None
        yield
    finally:
        os.close(folder)


def _write(path: Path, authority: Authority) -> None:
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(authority), indent=1))
    except OSError as error:
        raise MembershipError(f"{path} cannot be written: {error.strerror}") from None
