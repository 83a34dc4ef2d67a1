"""Which servers of a swarm share a model's weights, as they announce it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.errors import DhtError, WeightsUnavailable
from swarm.transport.p2p import Peer

REFRESH_S = 10.0
"""How long an answer of the DHT is used."""


class SharersOfModel:
    """Looks for servers that share the weights of one model.

    Args:
        peer: this peer.
        model: its name in the swarm.
        blocks: number of its blocks.
    """

    def __init__(self, peer: Peer, model: str, blocks: int) -> None:
        self._peer, self._model, self._blocks = peer, model, blocks
        self._found: list[str] = []
        self._found_at = float("-inf")

    async def find(self) -> Sequence[str]:
        """Their peer ids, in an order that spreads those who ask. If the DHT does not answer, those known before."""
        if not self._found or time.monotonic() - self._found_at >= REFRESH_S:
            try:
                servers = await fetch_servers(self._peer.dht, self._model, self._blocks)
            except DhtError:
                return self._found
            self._found = sharers(servers, self._peer.peer_id, random.Random())
            self._found_at = time.monotonic()
        return self._found


def sharers(servers: Sequence[ServerInfo], own_id: str, chance: random.Random) -> list[str]:
    """The servers that share weights, but for this peer, shuffled. Pure."""
    found = [
        one.peer_id
        for one in servers
        if one.shares_weights and one.peer_id != own_id and one.state is not ServerState.OFFLINE
    ]
    chance.shuffle(found)
    return found


async def find_model(peer: Peer, name: str) -> ModelInfo:
    """What the swarm says of a model. Raises `WeightsUnavailable` if no peer serves it, or `DhtError`."""
    models = await fetch_models(peer.dht)
    found = next((one for one in models if one.name == name), None)
    if found is None:
        there = ", ".join(one.name for one in models[:5])
        raise WeightsUnavailable(
            f"no server of this swarm serves {name}, so its weights cannot be had from peers"
            + (f". It serves {there}: give one of these names" if there else "")
        )
    return found
