"""Which DHT records a peer stores for others and believes: signed announcements and model records, nothing else.

hivemind's signature validator runs first, because it has the higher priority. This validator checks that the record
matches one of the two schemas, and that the peer it describes owns the key that signed it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from swarm.dht import model_records
from swarm.dht.server_records import MAX_LIFETIME_S, MAX_RECORD_BYTES, decode_announcement
from swarm.errors import ProtocolViolation
from swarm.transport.identity import peer_id_of

_OWNER = re.compile(re.escape(RSASignatureValidator.PUBLIC_KEY_FORMAT).replace(b"_key_", rb"(ssh-rsa [^\]]+)"))


def owner_of(subkey: bytes) -> str | None:
    """The id of the peer whose key a subkey contains, or None if it does not contain exactly one RSA key."""
    match = _OWNER.fullmatch(subkey)
    try:
        return peer_id_of(match[1]) if match else None
    except ValueError:
        return None


class AnnouncementValidator(RecordValidatorBase):
    """Accepts records that are well formed, signed by their owner, and do not live too long."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES or record.expiration_time > self._now() + MAX_LIFETIME_S:
            return False
        try:
            subkey = MSGPackSerializer.loads(record.subkey)
            value = MSGPackSerializer.loads(record.value)
        except Exception:  # msgpack and its extensions raise many types on garbage
            return False
        if not isinstance(subkey, bytes) or not isinstance(value, bytes):
            return False
        described = _described_peer(value)
        return described is not None and described == owner_of(subkey)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, AnnouncementValidator)


def _described_peer(value: bytes) -> str | None:
    """The id of the peer that a record of either kind describes, or None if the record is invalid."""
    with suppress(ProtocolViolation):
        return decode_announcement(value).peer_id
    with suppress(ProtocolViolation):
        return model_records.decode_model(value)[0]
    return None
