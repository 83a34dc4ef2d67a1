"""An invite: the one line that makes its owner's peers members. It holds a private key, so it is a secret."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import MembershipError, ProtocolViolation, UnknownAuthority
from swarm.membership.certificates import Certificate, Key, open_certificate, public_bytes

INVITE_PREFIX = "swarm-invite-1-"
MAX_LINE_CHARACTERS = 2048


class _InviteContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    authority: Key
    certificate: bytes
    private_key: Key


@dataclass(frozen=True)
class Invite:
    """A member's certificate with its private key. All peers of a member may use the same invite.

    Attributes:
        authority: public key of the authority.
        encoded_certificate: what the member shows to others.
        certificate: the same, decoded.
        private_key: raw; proves that the certificate is this member's.
    """

    authority: bytes
    encoded_certificate: bytes
    certificate: Certificate
    private_key: bytes = field(repr=False)

    def to_line(self) -> str:
        """The line that `parse_invite` reads: letters, digits, `-` and `_`."""
        content = _InviteContent(self.authority, self.encoded_certificate, self.private_key)
        encoded = base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode()
        return INVITE_PREFIX + encoded.rstrip("=")


def parse_invite(line: str) -> Invite:
    """Read an invite's line; whether it still holds is not checked. Raises `MembershipError`."""
    text = line.strip()
    if not text.startswith(INVITE_PREFIX) or len(text) > MAX_LINE_CHARACTERS:
        raise MembershipError(f"not an invite: an invite is one line that begins with {INVITE_PREFIX}")
    encoded = text.removeprefix(INVITE_PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        content = msgspec.msgpack.decode(data, type=_InviteContent)
        certificate = open_certificate(content.certificate, content.authority)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, ValueError, ProtocolViolation, UnknownAuthority):
        raise MembershipError(
            "the invite is damaged: copy the whole line, from the first character to the last"
        ) from None
    if public_bytes(Ed25519PrivateKey.from_private_bytes(content.private_key)) != certificate.member_key:
        raise MembershipError("the invite is damaged: its key belongs to another certificate")
    return Invite(content.authority, content.certificate, certificate, content.private_key)


def read_invite(text: str | os.PathLike[str] | None) -> Invite | None:
    """The invite of `--membership` or `SWARM_MEMBERSHIP`: the line itself, or the path of a file that holds it.

    None and an empty text give None, which stands for an open swarm. Raises `MembershipError`.
    """
    if text is None or text == "":
        return None
    if isinstance(text, str) and text.strip().startswith(INVITE_PREFIX):
        return parse_invite(text)
    path = Path(text)
    try:
        with path.open(encoding="ascii") as file:
            line = file.read(MAX_LINE_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # ValueError: other characters than ASCII, or a path with a zero byte
        why = error.strerror if isinstance(error, OSError) else "it is not a text file with an invite"
        # Part of an invite must not end up in a log. No character of an invite is a dot or a slash.
        shown = f"{str(path)!r}: " if {".", "/"} & set(str(path)) else ""
        raise MembershipError(
            f"the membership is neither an invite (a line that begins with {INVITE_PREFIX}) nor a file that holds one: "
            f"{shown}{why}"
        ) from None
    try:
        return parse_invite(line)
    except MembershipError as error:
        raise MembershipError(f"{path}: {error}") from None
