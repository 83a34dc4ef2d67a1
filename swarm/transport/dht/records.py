"""A signed record of the DHT, and whether a peer may believe it.

A record lies under a key and belongs to an owner. Its subkey is `[owner:ssh-rsa ...]` with the owner's public key, and
its value is a payload followed by `[signature:...]`, the format of hivemind's `RSASignatureValidator`. An owner has one
subkey: the canonical encoding of its key, without a comment. So it has one record under a key.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from swarm.transport.identity import PublicKey

MAX_PAYLOAD_BYTES = 8 * 1024
MAX_SUBKEY_BYTES = 1024
MAX_SIGNATURE_BYTES = 700
"""Base64 of the signature of a 4096-bit key, and the words around it."""

MAX_VALUE_BYTES = MAX_PAYLOAD_BYTES + MAX_SIGNATURE_BYTES
MAX_RECORD_BYTES = MAX_VALUE_BYTES + MAX_SUBKEY_BYTES

MAX_LIFETIME_S = 600.0
"""A record may be valid for at most this long."""

KEY_BYTES = DHTID.HASH_NBYTES
MAX_VERIFIED = 16384
"""Records whose signature was right that a peer remembers, so that it verifies no copy of them again."""

_OWNER = (b"[owner:", b"]")
_SIGNATURE = (b"[signature:", b"]")
_payload_decoder = msgspec.msgpack.Decoder(bytes)


class RecordProblem(enum.StrEnum):
    """Why a record is neither stored nor believed."""

    MALFORMED = "malformed"
    LIFETIME = "lifetime"
    """It has expired, or would live too long."""
    WRONG_KEY = "wrong_key"
    """It lies under another key than its content names."""
    WRONG_OWNER = "wrong_owner"
    """It describes, or comes from, another peer than its owner."""
    SIGNATURE = "signature"
    CACHED = "cached"
    """It was to be cached for other nodes, which this project's nodes do not do."""
    NO_ROOM = "no_room"
    BUSY = "busy"
    """Others have stored so much that its signature could not be verified."""


class RecordRules(Protocol):
    """What the records of a swarm mean."""

    def check(self, key: bytes, owner: str, payload: bytes) -> RecordProblem | None:
        """Why a payload of `owner` (a peer id) may not lie under `key`; None if it may. Raises nothing."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it travels.

    Attributes:
        key: digest of the key's name, `KEY_BYTES` long.
        subkey: names the owner.
        value: payload and signature.
        expires: Unix time.
    """

    key: bytes
    subkey: bytes
    value: bytes
    expires: float

    @property
    def size_bytes(self) -> int:
        return len(self.subkey) + len(self.value)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A record that may be believed: its owner's peer id and what the owner said."""

    owner: str
    payload: bytes


def key_bytes(name: str) -> bytes:
    """The key under which records named `name` lie."""
    return bytes(DHTID.generate(source=name).to_bytes())


def subkey_of(key: RSAPrivateKey) -> bytes:
    """The only subkey of the owner of this key."""
    encoded: bytes = key.get_public_key().to_bytes()
    return _OWNER[0] + encoded + _OWNER[1]


def owner_of(subkey: bytes) -> str | None:
    """The peer id of the owner that a subkey names, or None if it is not the canonical subkey of an RSA key."""
    if len(subkey) > MAX_SUBKEY_BYTES:
        return None
    parsed = _parse_subkey(subkey)
    return parsed.peer_id if parsed is not None else None


def _parse_subkey(subkey: bytes) -> PublicKey | None:
    begin, end = _OWNER
    if not subkey.startswith(begin) or not subkey.endswith(end):
        return None
    try:
        return PublicKey.parse(subkey[len(begin) : -len(end)])
    except ValueError:
        return None


def sign(name: str, payload: bytes, expires: float, key: RSAPrivateKey) -> Record:
    """The record by which the owner of `key` says `payload` under the key `name` until `expires`."""
    record = Record(key_bytes(name), subkey_of(key), msgspec.msgpack.encode(payload), expires)
    signature: bytes = key.sign(_signed_bytes(record, record.value))
    return Record(record.key, record.subkey, record.value + _SIGNATURE[0] + signature + _SIGNATURE[1], expires)


def _signed_bytes(record: Record, value: bytes) -> bytes:
    fields = (record.key, msgspec.msgpack.encode(record.subkey), value, record.expires)
    return bytes(MSGPackSerializer.dumps(fields))


class RecordChecker:
    """Decides which records a peer may believe; the cheap reasons against one come first.

    Args:
        rules: what the records of the swarm mean.
        now: Unix time.
    """

    def __init__(self, rules: RecordRules, now: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._now = now
        self._verified: OrderedDict[bytes, tuple[Accepted, float]] = OrderedDict()
        """By digest, with the time when they expire; the one asked for longest ago first."""

    def check(self, record: Record) -> Accepted | RecordProblem:
        """The record's owner and payload, or why it is refused. Raises nothing."""
        if len(record.key) != KEY_BYTES or len(record.value) > MAX_VALUE_BYTES:
            return RecordProblem.MALFORMED
        now = self._now()
        if not now <= record.expires <= now + MAX_LIFETIME_S:  # also refuses NaN
            return RecordProblem.LIFETIME
        digest = _digest(record)
        known = self._verified.get(digest)
        if known is not None:
            self._verified.move_to_end(digest)
            return known[0]
        verdict = self._examine(record)
        if isinstance(verdict, Accepted):
            self._verified[digest] = verdict, record.expires
            self._forget(now)
        return verdict

    def _forget(self, now: float) -> None:
        """Forget those that are over, or too many. Servers announce themselves anew every few minutes, or seconds.

        Nobody asks for one that is over, so it comes to the front; not before those there expire, which they do soon.
        """
        while self._verified:
            _, expires = next(iter(self._verified.values()))
            if len(self._verified) <= MAX_VERIFIED and not is_expired(expires, now):
                break
            self._verified.popitem(last=False)

    def _examine(self, record: Record) -> Accepted | RecordProblem:
        split = _split_value(record.value)
        parsed = _parse_subkey(record.subkey) if len(record.subkey) <= MAX_SUBKEY_BYTES else None
        if split is None or parsed is None:
            return RecordProblem.MALFORMED
        (encoded, payload, signature), owner = split, parsed.peer_id
        if (problem := self._rules.check(record.key, owner, payload)) is not None:
            return problem
        if not parsed.is_signed(_signed_bytes(record, encoded), signature):
            return RecordProblem.SIGNATURE
        return Accepted(owner, payload)


def _digest(record: Record) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(record), digest_size=16).digest()


def _split_value(value: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The encoded payload, the payload and the signature of a value; None if it has none, or not in canonical form."""
    encoded, begin, rest = value.rpartition(_SIGNATURE[0])
    signature = rest[: -len(_SIGNATURE[1])]
    if not begin or not rest.endswith(_SIGNATURE[1]) or len(signature) > MAX_SIGNATURE_BYTES:
        return None
    try:
        payload = _payload_decoder.decode(encoded)
        canonical = base64.b64encode(base64.b64decode(signature, validate=True)) == signature
    except (msgspec.MsgspecError, ValueError):
        return None
    if not canonical or len(payload) > MAX_PAYLOAD_BYTES or msgspec.msgpack.encode(payload) != encoded:
        return None
    return encoded, payload, signature


def is_expired(expires: float, now: float) -> bool:
    """Whether a record has expired. One whose expiry is not a finite number always has."""
    return not (math.isfinite(expires) and now <= expires)
