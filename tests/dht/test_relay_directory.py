from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.data_structures import ServerInfo, Whereabouts
from swarm.dht import relay_directory as module
from swarm.dht.relay_directory import REFRESH_S, RelayDirectory, relays_among
from swarm.errors import DhtError
from swarm.transport.reach.relay_choice import Relay
from tests import virtual_time
from tests.infos import server_info

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PUBLIC, SECOND = "/ip4/81.2.69.142/tcp/31337", "/ip6/2a02:8071:b783::1/tcp/31337"
RELAYED = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}/p2p-circuit"
LAN = "/ip4/192.168.0.7/tcp/31337"


def server(name: str, *addresses: str, relayed_peers: int = 64) -> ServerInfo:
    where = Whereabouts(addresses, (LAN,), "81.2.69.142")
    return server_info(0, 2, name, whereabouts=where, relayed_peers=relayed_peers)


def test_those_relay_who_say_so_and_can_be_dialed():
    found = relays_among(
        [
            server("relays", PUBLIC),
            server("relays, too", RELAYED, SECOND, PUBLIC, relayed_peers=1),
            server("does not", PUBLIC, relayed_peers=0),
            server("is behind a relay itself", RELAYED),
            server("is nowhere"),
        ]
    )
    assert found == [Relay("relays", PUBLIC), Relay("relays, too", SECOND)]
    assert relays_among([]) == []


class Dht:
    """What the DHT says; it notes how often it was asked."""

    def __init__(self) -> None:
        self.servers: list[ServerInfo] = []
        self.fails = False
        self.asked: list[object] = []
        self.dht: Any = object()

    async def fetch(self, dht: object, model: str, blocks: int) -> list[ServerInfo]:
        assert dht is self.dht
        self.asked.append((model, blocks))
        if self.fails:
            raise DhtError("nobody answers")
        return self.servers


@pytest.fixture
def dht(monkeypatch) -> Dht:
    made = Dht()
    monkeypatch.setattr(module, "fetch_servers", made.fetch)
    return made


def test_an_answer_of_the_dht_is_used_for_a_while(dht):
    async def scenario():
        directory = RelayDirectory(dht, "model", 12)
        dht.servers = [server("one", PUBLIC)]
        assert await directory.relays() == [Relay("one", PUBLIC)]
        dht.servers = [server("two", SECOND)]
        await asyncio.sleep(REFRESH_S - 1)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        assert dht.asked == [("model", 12)]
        await asyncio.sleep(2)
        assert await directory.relays() == [Relay("two", SECOND)]
        assert dht.asked == [("model", 12)] * 2

    virtual_time.run(scenario)


def test_if_the_dht_does_not_answer_the_relays_of_before_are_still_there(dht):
    async def scenario():
        directory = RelayDirectory(dht, "model", 12)
        dht.fails = True
        assert await directory.relays() == []
        dht.fails, dht.servers = False, [server("one", PUBLIC)]
        await asyncio.sleep(REFRESH_S)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        dht.fails = True
        await asyncio.sleep(REFRESH_S)
        assert await directory.relays() == [Relay("one", PUBLIC)]
        assert len(dht.asked) == 3

    virtual_time.run(scenario)
