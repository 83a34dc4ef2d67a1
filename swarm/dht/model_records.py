"""The list of models that the swarm runs, as it lies in the DHT.

Who serves blocks also stores one short record that names its model, so that whoever knows nothing but an initial peer
can find out what the swarm runs. The list is spread over a few keys: a reply of the DHT holds 2 MiB, which the records
of some two thousand servers under one key would fill.

What a record says is believed as far as others say the same: see `agreed_models`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from swarm.data_structures import ModelInfo
from swarm.dht.records import MAX_MODEL_BLOCKS, Name
from swarm.errors import ProtocolViolation

LIST_SHARDS = 8
"""Keys that the list is spread over."""

MAX_MODEL_RECORD_BYTES = 4096
MODEL_RECORD_LIFETIME_S = 300.0
"""Seconds that a record is valid: longer than an announcement, so that a model whose servers died is missed by name."""


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of a `ModelInfo` and its owner."""

    peer_id: Name
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_MODEL_BLOCKS)]
    revision: Name


_decoder = msgspec.msgpack.Decoder(ModelRecord)


def list_keys() -> tuple[str, ...]:
    """DHT keys of the whole list. They differ from the keys of all models' servers (`swarm.dht.records.model_key`)."""
    return tuple(f"swarm1-models/{shard}" for shard in range(LIST_SHARDS))


def list_key(peer_id: str) -> str:
    """DHT key under which a peer names its model."""
    return list_keys()[zlib.crc32(peer_id.encode()) % LIST_SHARDS]


def encode_model(peer_id: str, info: ModelInfo) -> bytes:
    """The record as bytes."""
    return msgspec.msgpack.encode(ModelRecord(peer_id, info.name, info.blocks, info.revision))


def decode_model(data: bytes) -> tuple[str, ModelInfo]:
    """Check a record against the schema: its owner's peer id, and what it says. Raises `ProtocolViolation`."""
    if len(data) > MAX_MODEL_RECORD_BYTES:
        raise ProtocolViolation(f"a model's record of {len(data)} bytes is too large")
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid record of a model: {error}") from None
    return record.peer_id, ModelInfo(record.model, record.blocks, record.revision)


def agreed_models(records: Iterable[tuple[str, ModelInfo]]) -> list[ModelInfo]:
    """One entry a name: what most peers say of it. The models that most peers name come first.

    Of equally frequent claims the smallest is taken, so that all readers decide alike.
    """
    claims: dict[str, Counter[ModelInfo]] = {}
    for info in dict(records).values():
        claims.setdefault(info.name, Counter())[info] += 1
    by_weight = sorted(claims, key=lambda name: (-claims[name].total(), name))
    return [min(claims[name], key=lambda info: (-claims[name][info], info)) for name in by_weight]
