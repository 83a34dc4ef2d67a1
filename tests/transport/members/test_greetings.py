from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.errors import MembershipError, MembershipRevoked, NotAMember, PeerLost
from swarm.membership.membership import Membership
from swarm.transport.members import greetings as module
from swarm.transport.members.gate import MemberGate
from swarm.transport.members.greetings import Greetings, greet_all, require_welcome
from tests.members import TestAuthority
from tests.memory_hub import MemoryHub, MemoryNetwork

PATIENCE_S = 30.0


class Node:
    """A member in memory that greets its neighbors."""

    def __init__(self, hub: MemoryHub, name: str, membership: Membership, neighbors: list[str]) -> None:
        self.network = MemoryNetwork(hub, name)
        self.gate = MemberGate(membership, name)
        self.greetings = Greetings(self.gate, self.greet, lambda: neighbors)

    async def greet(self, peer_id: str) -> None:
        stream = await self.network.open_stream(peer_id)
        try:
            await self.gate.enter(stream)
        finally:
            stream.close()


@pytest.mark.parametrize("swarm", ["ring", "star"])
def test_a_revocation_reaches_everybody_whoever_was_told(swarm, monkeypatch):
    """Each knows a few others only, and nobody waits for a period."""
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 3600.0)
    authority, count = TestAuthority(), 12

    async def scenario():
        hub = MemoryHub()
        nodes = []
        for number in range(count):
            neighbors = (
                [(number + 1) % count, (number + 2) % count] if swarm == "ring" else [0] if number else range(1, count)
            )
            membership = Membership(authority.invite(f"m{number}"))
            nodes.append(Node(hub, f"p{number}", membership, [f"p{one}" for one in neighbors]))
        for node in nodes:
            await node.network.serve(node.gate.admit)
        tasks = [asyncio.ensure_future(node.greetings.run()) for node in nodes]
        told = nodes[5]
        told.gate.membership.learn(authority.revoke(authority.invite("stranger")))
        told.gate.news.set()
        while any(node.gate.membership.revocations.number < 1 for node in nodes):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_who_was_missed_hears_of_it_in_the_next_period(monkeypatch):
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 0.05)
    authority = TestAuthority()

    async def scenario():
        hub = MemoryHub()
        quiet = Node(hub, "quiet", Membership(authority.invite("quiet")), [])
        asking = Node(hub, "asking", Membership(authority.invite("asking")), ["quiet"])
        quiet.gate.membership.learn(authority.revoke())
        await quiet.network.serve(quiet.gate.admit)
        task = asyncio.ensure_future(asking.greetings.run())
        while asking.gate.membership.revocations.number < 1:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_peer_that_was_revoked_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "GREETING_PERIOD_S", 0.01)
    authority = TestAuthority()

    async def scenario():
        invite = authority.invite("anna")
        gate = MemberGate(Membership(invite), "anna")
        gate.membership.learn(authority.revoke(invite))
        rounds = []

        def neighbors():
            rounds.append(None)
            return []

        async def greet(peer_id):
            raise AssertionError("there is nobody")

        task = asyncio.ensure_future(Greetings(gate, greet, neighbors).run())
        while len(rounds) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    logging.getLogger("swarm").propagate = True
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    said = [line for line in caplog.messages if "not a member of the swarm any more" in line]
    assert len(said) == 1
    assert "membership of anna was revoked" in said[0]


def test_troubles_of_one_greeting_are_not_those_of_another():
    async def greet(peer_id):
        if peer_id == "gone":
            raise PeerLost("gone")

    results = asyncio.run(greet_all(["gone", "here", "here"], greet))
    assert results["here"] is None
    assert isinstance(results["gone"], PeerLost)


def test_one_welcome_is_enough_and_a_refusal_says_why():
    lost, refused = PeerLost("lost"), MembershipRevoked("the membership of anna was revoked")
    require_welcome({})
    require_welcome({"a": lost})
    require_welcome({"a": refused, "b": None})
    with pytest.raises(MembershipError, match="membership of anna was revoked"):
        require_welcome({"a": refused, "b": lost})
    with pytest.raises(MembershipError, match="open swarm"):
        require_welcome({"a": NotAMember("it is of an open swarm")})
