"""Pairing a worker with its starter: the line to copy, the proof, and which starter is accepted. Pure.

libp2p has authenticated both peer ids and encrypts the stream. The starter proves that it knows the secret of the line:
an HMAC under the secret over a random number of each side and both peer ids, so a proof serves for one stream between
these two peers only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from swarm.errors import PairedWithAnother, WorkerLineError, WrongSecret
from swarm.protocol.messages.peers import Addresses, Label, PairRequest, WorkerChallenge

LINE_PREFIX = "swarm-worker:"
MAX_LINE_CHARACTERS = 4096
SECRET_BYTES = 16
"""128 random bits, which cannot be guessed, however many attempts there are."""

CONTEXT = b"swarm worker pairing 1"
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{1,128}")


class _LineContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    peer_id: str
    name: Label
    addresses: Annotated[Addresses, msgspec.Meta(min_length=1)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)] | None


@dataclass(frozen=True)
class WorkerLine:
    """What the one line of `swarm worker` says.

    Attributes:
        peer_id: of the worker.
        name: of its device, shown to people.
        addresses: multiaddresses at which it may be dialed, without its peer id.
        secret: proves to it that this starter was given the line; None if it answers only members of a private swarm.
    """

    peer_id: str
    name: str
    addresses: tuple[str, ...]
    secret: bytes | None = field(repr=False)

    def to_line(self) -> str:
        """The text that `parse_line` reads. It is a secret like a password, unless the worker is a member's."""
        content = _LineContent(self.peer_id, self.name, self.addresses, self.secret)
        return LINE_PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.name} (…{self.peer_id[-6:]})"


def parse_line(text: str) -> WorkerLine:
    """Read a worker's line. Raises `WorkerLineError`, which does not repeat what may be part of a secret."""
    line = text.strip()
    if not line.startswith(LINE_PREFIX) or len(line) > MAX_LINE_CHARACTERS:
        raise WorkerLineError(
            f"a text of {len(line)} characters is not a worker's line: run `swarm worker` on the helping machine, and "
            f"copy the line that it prints, which begins with {LINE_PREFIX}"
        )
    encoded = line.removeprefix(LINE_PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        content = msgspec.msgpack.decode(data, type=_LineContent)
        if not _PEER_ID.fullmatch(content.peer_id):
            raise ValueError(content.peer_id)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, ValueError):
        raise WorkerLineError(
            "a worker's line is damaged: copy the whole line, from the first character to the last"
        ) from None
    return WorkerLine(content.peer_id, content.name, content.addresses, content.secret)


def parse_lines(texts: Sequence[str]) -> tuple[WorkerLine, ...]:
    """Read the lines of a ring's workers. Raises `WorkerLineError`, also if a worker is named twice, or none is."""
    lines = tuple(map(parse_line, texts))
    if not lines:
        raise WorkerLineError(
            "a ring needs at least one worker: run `swarm worker` on another machine, and pass the line that it prints "
            "with --workers"
        )
    seen: set[str] = set()
    for line in lines:
        if line.peer_id in seen:
            raise WorkerLineError(f"worker {line} is named twice: give each worker's line once")
        seen.add(line.peer_id)
    return lines


def require_same_lock(line: WorkerLine, is_member: bool) -> None:
    """Raise `WorkerLineError` unless the worker and the starter are both members of a private swarm, or neither is."""
    if line.secret is None and not is_member:
        raise WorkerLineError(
            f"worker {line} answers only members of its private swarm: pass your invite with --membership"
        )
    if line.secret is not None and is_member:
        raise WorkerLineError(
            f"worker {line} is not a member of your private swarm: start it with --membership, or leave the "
            "membership out here"
        )


def new_secret() -> bytes:
    """A pairing secret."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """A random number for one stream."""
    return secrets.token_bytes(32)


def proof(secret: bytes, worker_nonce: bytes, starter_nonce: bytes, worker_id: str, starter_id: str) -> bytes:
    """What only a starter that knows the secret can compute, for one stream."""
    parts = (worker_nonce, starter_nonce, worker_id.encode(), starter_id.encode())
    said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, CONTEXT + said, hashlib.sha256)


def answer_challenge(challenge: WorkerChallenge, line: WorkerLine, own_id: str, name: str) -> PairRequest:
    """The starter's answer to a worker's challenge."""
    nonce = new_nonce()
    shown = proof(line.secret, challenge.nonce, nonce, line.peer_id, own_id) if line.secret is not None else b""
    return PairRequest(nonce, shown, name)


def require_proof(
    request: PairRequest, challenge: WorkerChallenge, secret: bytes | None, own_id: str, starter_id: str
) -> None:
    """Raise `WrongSecret` unless the starter knows the secret. Without a secret, a gate has let only members in."""
    if secret is None:
        return
    expected = proof(secret, challenge.nonce, request.nonce, own_id, starter_id)
    if not hmac.compare_digest(expected, request.proof):
        raise WrongSecret(
            "the pairing secret is wrong: copy the line that the worker prints now; after `swarm worker --forget` an "
            "earlier one counts no more"
        )


def require_starter(paired_with: str | None, starter_id: str) -> None:
    """Raise `PairedWithAnother` if a worker has another starter than the one that asks."""
    if paired_with not in (None, starter_id):
        raise PairedWithAnother(
            f"it is paired with another starter (…{str(paired_with)[-6:]}): end the pairing there (swarm ring "
            "--unpair), or run `swarm worker --forget` on that machine, which prints a new line"
        )
