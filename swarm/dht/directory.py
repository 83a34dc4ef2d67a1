"""Reading the DHT: which models the swarm runs, and which servers serve a model now."""

from __future__ import annotations

import time

from hivemind.dht.node import DHTNode

from swarm.data_structures import ModelInfo, ServerInfo
from swarm.dht import model_records
from swarm.dht.hivemind_errors import raise_dht_errors
from swarm.dht.server_records import decode_announcement, model_key
from swarm.errors import ProtocolViolation


async def fetch_models(dht: DHTNode) -> list[ModelInfo]:
    """The models that peers of the swarm claim to serve, those named by most peers first.

    Any peer can name any model, so the caller should use only as many as it is ready to look at. Raises `DhtError`.
    """
    with raise_dht_errors("reading the list of models"):
        found = await dht.get_many(model_records.list_keys(), sufficient_expiration_time=float("inf"))
    records = []
    for entry in found.values():
        if entry is None or not isinstance(entry.value, dict):
            continue
        for value, expires in entry.value.values():
            record = _decode_model(value)
            if record is not None and expires >= time.time():
                records.append(record)
    return model_records.agreed_models(records)


async def fetch_servers(dht: DHTNode, model: str, blocks: int) -> list[ServerInfo]:
    """All servers that announce blocks of `model`, in any state, ordered by span and peer.

    Records that do not fit a model of `blocks` blocks are left out, and so are those that the validators reject.
    Raises `DhtError`.
    """
    keys = [model_key(model, block) for block in range(blocks)]
    with raise_dht_errors("reading the announcements"):
        found = await dht.get_many(keys, sufficient_expiration_time=float("inf"))
    servers: dict[str, tuple[float, ServerInfo]] = {}
    for block, key in enumerate(keys):
        entry = found.get(key)
        if entry is None or not isinstance(entry.value, dict):
            continue
        for value, expires in entry.value.values():
            info = _decode(value)
            if info is None or info.span.start != block or info.span.end > blocks or expires < time.time():
                continue
            # A server that moved has records under two keys; the one that expires later is the newer one.
            known = servers.get(info.peer_id)
            if known is None or known[0] < expires:
                servers[info.peer_id] = (expires, info)
    return sorted((info for _, info in servers.values()), key=lambda info: (info.span, info.peer_id))


def _decode(value: object) -> ServerInfo | None:
    if not isinstance(value, bytes):
        return None
    try:
        return decode_announcement(value)
    except ProtocolViolation:
        return None


def _decode_model(value: object) -> tuple[str, ModelInfo] | None:
    if not isinstance(value, bytes):
        return None
    try:
        return model_records.decode_model(value)
    except ProtocolViolation:
        return None
