"""Reading the DHT: which models the swarm runs, which servers serve a model now, and which of them relay."""

from __future__ import annotations

import time
from collections.abc import Sequence

from swarm.data_structures import ModelInfo, ServerInfo
from swarm.dht import model_records
from swarm.dht.server_records import decode_announcement, model_key
from swarm.errors import DhtError, ProtocolViolation
from swarm.transport.addresses import is_direct
from swarm.transport.dht.node import DhtNode
from swarm.transport.p2p import Peer
from swarm.transport.reach.relay_choice import Relay

MAX_HOLDERS = 128
"""Servers of a block that a reader's picture of a swarm keeps, unless some of them are needed for other blocks."""


async def fetch_models(dht: DhtNode) -> list[ModelInfo]:
    """The models that peers of the swarm claim to serve, those named by most peers first.

    Any peer can name any model, so the caller should use only as many as it is ready to look at. Raises `DhtError`.
    """
    found = await dht.find(model_records.list_keys())
    records = []
    for entries in found.values():
        for entry in entries:
            try:
                records.append(model_records.decode_model(entry.payload))
            except ProtocolViolation:
                continue
    return model_records.agreed_models(records)


async def fetch_servers(dht: DhtNode, model: str, blocks: int) -> list[ServerInfo]:
    """The servers that announce blocks of `model`, in any state, ordered by span and peer.

    Where they can be dialed is noted in the node's address book. Records that do not fit a model of `blocks` blocks are
    left out, and so are those that break the rules. Of very many servers, those are kept that have served this peer or
    have long been there; see `bounded_picture`.

    Raises `DhtError`.
    """
    found = await dht.find([model_key(model, block) for block in range(blocks)])
    servers: dict[str, tuple[float, ServerInfo]] = {}
    for entries in found.values():
        for entry in entries:
            try:
                _, info = decode_announcement(entry.payload)
            except ProtocolViolation:
                continue
            if info.span.end > blocks:
                continue
            # A server that moved has records under two keys; the one that expires later is the newer one.
            known = servers.get(info.peer_id)
            if known is None or known[0] < entry.expires:
                servers[info.peer_id] = (entry.expires, info)
    best_first = dht.best_first(servers)
    kept = bounded_picture([servers[peer_id][1] for peer_id in best_first], blocks)
    for info in kept:
        dht.book.learn(info.peer_id, info.whereabouts)
    return sorted(kept, key=lambda info: (info.span, info.peer_id))


def bounded_picture(best_first: Sequence[ServerInfo], blocks: int, limit: int = MAX_HOLDERS) -> list[ServerInfo]:
    """The servers that a reader keeps: each one that is among the first `limit` holders of at least one of its blocks.

    So at most `limit` x `blocks` are kept, and no number of servers at the end of the list displaces one at its front.

    Args:
        best_first: servers of a model of `blocks` blocks, those to keep rather first; see `DhtNode.best_first`.
    """
    holders = [0] * blocks
    kept = []
    for info in best_first:
        held = range(info.span.start, info.span.end)
        if any(holders[block] < limit for block in held):
            kept.append(info)
            for block in held:
                holders[block] += 1
    return kept


REFRESH_S = 15.0
"""How long an answer of the DHT is used."""


class RelayDirectory:
    """The servers of one model that relay.

    Args:
        peer: this peer.
        model: name of the model.
        blocks: number of its blocks.
    """

    def __init__(self, peer: Peer, model: str, blocks: int) -> None:
        self._peer = peer
        self._model = model
        self._blocks = blocks
        self._found: list[Relay] = []
        self._found_at = float("-inf")

    async def relays(self) -> list[Relay]:
        """The servers that relay. If the DHT does not answer, those that were known before."""
        if time.monotonic() - self._found_at >= REFRESH_S:
            self._found_at = time.monotonic()
            try:
                servers = await fetch_servers(self._peer.dht, self._model, self._blocks)
            except DhtError:
                return self._found
            self._found = relays_among(servers)
        return self._found


def relays_among(servers: list[ServerInfo]) -> list[Relay]:
    """Those servers that relay, each at the first address at which it can be dialed itself."""
    found = []
    for server in servers:
        address = next(filter(is_direct, server.whereabouts.addresses), None)
        if server.relayed_peers and address is not None:
            found.append(Relay(server.peer_id, address))
    return found
