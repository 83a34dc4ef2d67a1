from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.utils.multiaddr import Multiaddr

from swarm.transport.dht.peer_networks import PeerNetworks, network_of_addresses
from tests.transport.dht.test_routing_table import PEERS


def test_the_network_of_an_address():
    for addresses, network in [
        ([], ""),
        (["/ip4/192.0.2.77/tcp/1"], "192.0.2.0/24"),
        (["/ip6/2001:db8:1:2::3/tcp/1"], "2001:db8:1::/48"),
        (["/ip4/192.0.2.77/tcp/1/p2p/" + str(PEERS[0]) + "/p2p-circuit"], "192.0.2.0/24"),
        (["/dns4/example.org/tcp/1", "/ip4/198.51.100.1/udp/1/quic"], "198.51.100.0/24"),
    ]:
        assert network_of_addresses(map(Multiaddr, addresses)) == network


class Daemon:
    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def list_peers(self) -> list[PeerInfo]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return [PeerInfo(PEERS[0], [Multiaddr("/ip4/192.0.2.77/tcp/1")])]


def test_the_daemon_is_asked_now_and_then():
    async def scenario():
        daemon = Daemon()
        p2p: Any = SimpleNamespace(_client=daemon)
        networks = PeerNetworks(p2p)
        assert await networks.network_of(str(PEERS[0])) == "192.0.2.0/24"
        assert await networks.network_of(str(PEERS[0])) == "192.0.2.0/24"
        assert await networks.network_of(str(PEERS[1])) == ""
        assert daemon.asked == 1
        networks._asked_at = float("-inf")
        daemon.error = OSError("gone")
        assert await networks.network_of(str(PEERS[1])) == ""
        assert daemon.asked == 2

    asyncio.run(scenario())
