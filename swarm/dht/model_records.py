"""The list of models that the swarm runs, as stored in the DHT.

A server also stores one short record that names its model, so that a peer that knows only an initial peer can find out
which models the swarm runs. The list is spread over several keys, because a node keeps a limited number of records
under each.

A record is believed if most of the others agree with it: see `agreed_models`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from swarm.data_structures import ModelInfo
from swarm.dht.server_records import MAX_MODEL_BLOCKS, Name
from swarm.errors import ProtocolViolation

LIST_SHARDS = 8
"""Number of keys over which the list is spread."""

MAX_MODEL_RECORD_BYTES = 4096
MODEL_RECORD_LIFETIME_S = 300.0
"""A model record lives longer than an announcement, so that a model whose servers died can be reported as missing."""


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wire form of a `ModelInfo` and its owner."""

    peer_id: Name
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_MODEL_BLOCKS)]
    revision: Name


_decoder = msgspec.msgpack.Decoder(ModelRecord)


def list_keys() -> tuple[str, ...]:
    """DHT keys of the whole list. They differ from the keys of servers (`server_records.model_key`)."""
    return tuple(f"swarm3-models/{shard}" for shard in range(LIST_SHARDS))


def list_key(peer_id: str) -> str:
    """DHT key under which a peer stores its model record."""
    return list_keys()[zlib.crc32(peer_id.encode()) % LIST_SHARDS]


def encode_model(peer_id: str, info: ModelInfo) -> bytes:
    """Encode a model record."""
    return msgspec.msgpack.encode(ModelRecord(peer_id, info.name, info.blocks, info.revision))


def decode_model(data: bytes) -> tuple[str, ModelInfo]:
    """Decode and validate a model record: its owner's peer id, and the model. Raises `ProtocolViolation`."""
    if len(data) > MAX_MODEL_RECORD_BYTES:
        raise ProtocolViolation(
            f"a model record of {len(data)} bytes is too large; at most {MAX_MODEL_RECORD_BYTES} are allowed"
        )
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"not a valid model record: {error}") from None
    return record.peer_id, ModelInfo(record.model, record.blocks, record.revision)


def agreed_models(records: Iterable[tuple[str, ModelInfo]]) -> list[ModelInfo]:
    """One entry for each model name: the claim that most peers make. Models that most peers name come first.

    Among equally frequent claims the smallest wins, so that all readers decide alike.
    """
    claims: dict[str, Counter[ModelInfo]] = {}
    for info in dict(records).values():
        claims.setdefault(info.name, Counter())[info] += 1
    by_weight = sorted(claims, key=lambda name: (-claims[name].total(), name))
    return [min(claims[name], key=lambda info: (-claims[name][info], info)) for name in by_weight]
