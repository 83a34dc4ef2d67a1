"""Notices about peers that cannot be dialed, in memory and on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from swarm.errors import PeerLost, RequestRefused
from swarm.protocol import messages
from swarm.transport.reach.notices import BURST, BURST_OF_NETWORK, PEER_PERIOD_S, Notices
from tests import virtual_time
from tests.memory_hub import stream_pair
from tests.transport.reach.fakes import peer_id

OWN, HOME, FIRST, SECOND = (peer_id(name) for name in ("own", "home", "first", "second"))
FROM = "/ip4/81.2.69.142/tcp/50123"


class World:
    """A peer with two initial peers.

    Attributes:
        sent: what it has sent to whom.
        connected: whom it has a connection to.
        dropped: whose connections it was told to close.
        looks: how often it was told to look for itself.
        lost: whom it cannot reach.
    """

    def __init__(self, *initial_peers: str) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.connected: set[str] = set()
        self.dropped: list[str] = []
        self.looks = 0
        self.lost: set[str] = set()
        p2p: Any = SimpleNamespace(
            peer_id=PeerID.from_base58(OWN), list_peers=self._list, _client=SimpleNamespace(disconnect=self._drop)
        )
        self.notices = Notices(p2p, initial_peers, self._open, self._look)

    async def _list(self) -> list[Any]:
        return [SimpleNamespace(peer_id=PeerID.from_base58(one), addrs=[FROM]) for one in self.connected]

    async def _drop(self, peer: PeerID) -> None:
        self.dropped.append(peer.to_base58())

    async def _open(self, target: str) -> Any:
        if target in self.lost:
            raise PeerLost("it is gone")
        ours, theirs = stream_pair(OWN, target)
        self.sent.append((target, asyncio.ensure_future(theirs.receive(0))))
        return ours

    def _look(self) -> None:
        self.looks += 1

    async def told(self) -> list[tuple[str, Any]]:
        """What was sent so far, decoded."""
        await asyncio.sleep(0.1)
        return [(target, messages.decode_reachability((await frame).header)) for target, frame in self.sent]


def run(scenario: Any, *initial_peers: str) -> None:
    async def whole() -> None:
        world = World(*initial_peers)
        await scenario(world)
        await world.notices.close()

    virtual_time.run(whole)


def test_the_initial_peers_are_told_of_a_peer_that_cannot_be_dialed_once_a_minute():
    async def scenario(world):
        for _ in range(3):
            world.notices.tell(HOME)
        notice = messages.UnreachableNotice(HOME)
        assert await world.told() == [(FIRST, notice), (SECOND, notice)]
        await asyncio.sleep(PEER_PERIOD_S)
        world.notices.tell(HOME)
        assert len(await world.told()) == 4

    run(scenario, FIRST, SECOND)


def test_nobody_is_told_of_initial_peers_or_where_there_are_none():
    async def scenario(world):
        world.notices.tell(FIRST)
        assert await world.told() == []

    run(scenario, FIRST)
    run(scenario)


def test_of_many_peers_that_are_gone_only_a_few_are_told():
    async def scenario(world):
        for number in range(100):
            world.notices.tell(peer_id(str(number)))
        assert len(await world.told()) == BURST

    run(scenario, FIRST)


def test_a_notice_is_passed_on_over_a_connection_that_is_there():
    async def scenario(world):
        world.connected = {SECOND}
        await world.notices.receive(messages.UnreachableNotice(FIRST), SECOND, FROM)
        assert await world.told() == []
        world.connected = {HOME}
        for _ in range(3):
            await world.notices.receive(messages.UnreachableNotice(HOME), SECOND, FROM)
        assert await world.told() == [(HOME, messages.LookAgain())]
        assert world.looks == 0

    run(scenario, FIRST)


def test_what_is_no_peer_id_is_passed_on_to_nobody():
    async def scenario(world):
        world.connected = {HOME}
        for text in ("x", "1" * 128, "z" * 128):
            await world.notices.receive(messages.UnreachableNotice(text), SECOND, FROM)
        assert await world.told() == []

    run(scenario)


def test_a_flood_of_notices_is_refused():
    async def scenario(world):
        names = [peer_id(str(number)) for number in range(100)]
        world.connected = set(names)
        refused = 0
        for name in names:
            try:
                await world.notices.receive(messages.UnreachableNotice(name), SECOND, FROM)
            except RequestRefused:
                refused += 1
        assert refused == len(names) - BURST_OF_NETWORK
        assert len(await world.told()) == BURST_OF_NETWORK

    run(scenario)


def test_a_notice_that_comes_through_a_relay_is_refused():
    async def scenario(world):
        with pytest.raises(RequestRefused, match="through a relay"):
            await world.notices.receive(messages.UnreachableNotice(HOME), SECOND, f"{FROM}/p2p/{FIRST}/p2p-circuit")

    run(scenario)


def test_a_peer_that_is_told_looks_for_itself_once_a_minute():
    async def scenario(world):
        for _ in range(50):
            await world.notices.receive(messages.LookAgain(), FIRST, FROM)
        assert world.looks == 1
        await asyncio.sleep(PEER_PERIOD_S)
        await world.notices.receive(messages.LookAgain(), FIRST, FROM)
        assert world.looks == 2
        assert await world.told() == []

    run(scenario, FIRST)


def test_a_relay_forgets_the_connections_of_whoever_asks_and_of_nobody_else():
    async def scenario(world):
        world.connected = {HOME, SECOND}
        await world.notices.receive(messages.ForgetConnections(), HOME, FROM)
        assert world.dropped == [HOME]

    run(scenario)
