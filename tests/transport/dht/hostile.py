"""Owners of records, and what a hostile one may send."""

from __future__ import annotations

from functools import cache

import msgspec
from hivemind.utils.crypto import RSAPrivateKey

from swarm.transport.dht.records import Record, RecordProblem, sign
from swarm.transport.identity import peer_id_of

NOW = 1_000_000.0


class Anywhere:
    """Rules by which everything but the payload `bad` may lie anywhere."""

    def check(self, key: bytes, owner: str, payload: bytes) -> RecordProblem | None:
        return RecordProblem.MALFORMED if payload == b"bad" else None


@cache
def private_key(number: int) -> RSAPrivateKey:
    """Keys take a while to make."""
    return RSAPrivateKey()


def owner_name(number: int) -> str:
    return peer_id_of(private_key(number).get_public_key().to_bytes())


@cache
def signed(number: int = 0, name: str = "key", payload: bytes = b"payload", expires: float = NOW + 60) -> Record:
    """A record of the owner with this number. Signatures are random, so each is made once."""
    return sign(name, payload, expires, private_key(number))


def unsigned(owner: str, key: bytes, size: int = 100, expires: float = NOW + 60) -> Record:
    """A record for tests of what comes after the signature was found right."""
    return Record(key, b"[owner:" + owner.encode() + b"]", bytes(size), expires)


def dictionary(*, maxsize: object = None, latest: object = NOW + 60, items: object = (), code: int = 0x50) -> bytes:
    """The value of an answer, in hivemind's form, with anything inside."""
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode((maxsize, latest, items))))
