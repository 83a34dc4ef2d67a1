"""From records to servers: who serves a model now."""

from __future__ import annotations

import time

from hivemind.dht.node import DHTNode

from swarm.data_structures import ServerInfo
from swarm.dht.records import decode, model_key
from swarm.errors import ProtocolViolation


async def fetch_servers(dht: DHTNode, model: str, blocks: int) -> list[ServerInfo]:
    """All servers that announce blocks of `model`, in any state, ordered by span and peer.

    Records that do not fit a model of `blocks` blocks are left out, as are those that hivemind's validators refuse.
    """
    keys = [model_key(model, block) for block in range(blocks)]
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
            # A server that moved has records under two keys; the one that lives longer is the newer one.
            known = servers.get(info.peer_id)
            if known is None or known[0] < expires:
                servers[info.peer_id] = (expires, info)
    return sorted((info for _, info in servers.values()), key=lambda info: (info.span, info.peer_id))


def _decode(value: object) -> ServerInfo | None:
    if not isinstance(value, bytes):
        return None
    try:
        return decode(value)
    except ProtocolViolation:
        return None
