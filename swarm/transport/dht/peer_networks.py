"""The network from which a peer is connected: addresses cost more than identities do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address, ip_network

from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import DhtError
from swarm.transport.dht.hivemind_errors import raise_dht_errors

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""The daemon is asked for its connections at most this often."""

TIMEOUT_S = 1.0


def network_of_addresses(addresses: Iterable[Multiaddr]) -> str:
    """The /24 (IPv4) or /48 (IPv6) of the first address that has an IP; empty if none has."""
    for address in addresses:
        for name in ("ip4", "ip6"):
            if name in address:
                host = ip_address(address[name])
                prefix = 48 if isinstance(host, IPv6Address) else 24
                return str(ip_network((host, prefix), strict=False))
    return ""


class PeerNetworks:
    """The networks of connected peers, as the libp2p daemon knows them.

    Args:
        p2p: the daemon.
    """

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self._networks: dict[str, str] = {}
        self._asked_at = float("-inf")

    async def network_of(self, peer_id: str) -> str:
        """The network of a connected peer; empty if it is not known now. Raises nothing."""
        if peer_id not in self._networks and time.monotonic() - self._asked_at >= REFRESH_S:
            self._asked_at = time.monotonic()
            try:
                with raise_dht_errors("asking the libp2p daemon for its connections"):
                    async with asyncio.timeout(TIMEOUT_S):
                        peers = await self._p2p._client.list_peers()
            except DhtError as error:
                logger.debug("%s", error)
                return ""
            self._networks = {peer.peer_id.to_base58(): network_of_addresses(peer.addrs) for peer in peers}
        return self._networks.get(peer_id, "")
