"""What the records of a swarm's DHT mean: announcements of servers and model records, nothing else.

Every peer stores and believes only records whose signature is right (`swarm.transport.dht.records`). These rules add
that a record matches one of the two schemas, describes the peer that signed it, and lies under the key that follows
from its content.
"""

from __future__ import annotations

from contextlib import suppress

from swarm.dht import model_records
from swarm.dht.server_records import decode_announcement, model_key
from swarm.errors import ProtocolViolation
from swarm.transport.dht.records import RecordProblem, key_bytes


class AnnouncementValidator:
    """The rules of a swarm's records; see `RecordRules`."""

    def check(self, key: bytes, owner: str, payload: bytes) -> RecordProblem | None:
        described = _describe(payload)
        if described is None:
            return RecordProblem.MALFORMED
        peer_id, name = described
        if peer_id != owner:
            return RecordProblem.WRONG_OWNER
        return None if key_bytes(name) == key else RecordProblem.WRONG_KEY


def _describe(payload: bytes) -> tuple[str, str] | None:
    """The peer that a record of either kind describes, and the name of its key; None if the record is invalid."""
    with suppress(ProtocolViolation):
        model, info = decode_announcement(payload)
        return info.peer_id, model_key(model, info.span.start)
    with suppress(ProtocolViolation):
        peer_id, _ = model_records.decode_model(payload)
        return peer_id, model_records.list_key(peer_id)
    return None
