"""When a server's announcement is stored. The DHT is played; times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from swarm.data_structures import ModelInfo, ServerInfo, Whereabouts
from swarm.dht.announcer import Announcer
from swarm.dht.server_records import decode_announcement
from tests import virtual_time
from tests.infos import server_info

PERIOD = 30.0
ELSEWHERE = Whereabouts(("/ip4/81.2.69.142/tcp/31337",), ("/ip4/192.168.0.7/tcp/31337",), "81.2.69.142")


class Server:
    """A peer whose DHT keeps what is stored.

    Attributes:
        stored: what was announced, and when.
        seconds: that storing takes.
    """

    def __init__(self) -> None:
        self.reach = SimpleNamespace(is_relayed=False, whereabouts=Whereabouts())
        self.dht = SimpleNamespace(store=self.store)
        self.stored: list[tuple[float, ServerInfo]] = []
        self.seconds = 0.0

    async def store(self, records: Any) -> list[bool]:
        await asyncio.sleep(self.seconds)
        self.stored.append((asyncio.get_running_loop().time(), decode_announcement(records[0][1])[1]))
        return [True] * len(records)

    @property
    def times(self) -> list[float]:
        return [when for when, _ in self.stored]


def run(scenario: Callable[[Server, Announcer], Awaitable[None]]) -> None:
    async def whole() -> None:
        server: Any = Server()
        announcer = Announcer(server, ModelInfo("model", 2, "main"), lambda: server_info(0, 2), PERIOD)
        try:
            await scenario(server, announcer)
        finally:
            await announcer.stop()

    virtual_time.run(whole)


def test_a_change_is_announced_at_once_and_then_the_period_begins_anew():
    async def scenario(server, announcer):
        announcer.start()
        await asyncio.sleep(10)
        announcer.announce_soon()
        announcer.announce_soon()
        await asyncio.sleep(PERIOD + 1)
        assert server.times == [0.0, 10.0, 10.0 + PERIOD]

    run(scenario)


def test_a_change_while_an_announcement_is_stored_is_announced_after_it():
    async def scenario(server, announcer):
        server.seconds = 4.0
        announcer.start()
        await asyncio.sleep(1)
        server.reach.whereabouts = ELSEWHERE
        announcer.announce_soon()
        await asyncio.sleep(10)
        assert server.times == [4.0, 8.0]
        assert [info.whereabouts for _, info in server.stored] == [Whereabouts(), ELSEWHERE]

    run(scenario)


def test_how_the_peer_is_reached_is_announced_as_it_is_then():
    async def scenario(server, announcer):
        assert await announcer.announce()
        server.reach = SimpleNamespace(is_relayed=True, whereabouts=ELSEWHERE)
        assert await announcer.announce()
        first, second = (info for _, info in server.stored)
        assert (first.relayed, first.whereabouts) == (False, Whereabouts())
        assert (second.relayed, second.whereabouts) == (True, ELSEWHERE)

    run(scenario)


def test_nothing_is_announced_after_the_end():
    async def scenario(server, announcer):
        announcer.start()
        await asyncio.sleep(1)
        await announcer.stop()
        announcer.announce_soon()
        await asyncio.sleep(2 * PERIOD)
        assert server.times == [0.0]

    run(scenario)
