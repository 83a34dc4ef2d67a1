"""Which servers relay for others, as they announce it."""

from __future__ import annotations

import time

from swarm.data_structures import ServerInfo
from swarm.dht.directory import fetch_servers
from swarm.errors import DhtError
from swarm.transport.addresses import is_direct
from swarm.transport.p2p import Peer
from swarm.transport.reach.relay_choice import Relay

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
