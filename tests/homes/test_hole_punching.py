"""Homes that are connected directly, although neither can be dialed."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import pytest

from swarm.dht.validation import AnnouncementValidator
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig
from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, Nat, needs_root, received_bytes
from tests.homes.processes import EVERYWHERE, Process, run_on
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 300
WHOLE_BYTES = TOKENS * 192 * 4
"""The hidden states of a text, in fp32."""


def test_homes_need_their_relay_only_to_find_each_other(homes):
    """The relay is ended in the middle of the last text."""
    boot = homes.lab.host("boot", 2)
    bootstrap = homes.bootstrap(boot)
    first, second, third = (homes.lab.home(name, number) for name, number in (("a", 10), ("b", 11), ("c", 12)))
    for server in [homes.server(first.machine, "0:6"), homes.server(second.machine, "6:12")]:
        server.wait_ready()
    for place in (homes.lab.host("away", 3), third.machine):
        client = homes.client(place)
        before = received_bytes(boot)
        written = client.write(PROMPT[0].tolist(), TOKENS)
        assert written.tokens == demo_text(PROMPT, TOKENS)
        assert not written.avoided
        assert received_bytes(boot) - before < WHOLE_BYTES / 2, "it went over the relay"
    client.begin(PROMPT[0].tolist(), TOKENS)
    client.wait_for(100)
    bootstrap.kill()
    assert client.finish().tokens == demo_text(PROMPT, TOKENS)
    assert not client.reconnects


def test_relays_carry_what_a_router_with_random_ports_keeps_apart(homes):
    boot = homes.lab.host("boot", 2)
    homes.bootstrap(boot)
    homes.server(homes.lab.home("a", 10).machine, "0:12", homes.log("server")).wait_ready()
    client = homes.client(homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine)
    before = received_bytes(boot)
    written = client.write(PROMPT[0].tolist(), TOKENS)
    assert written.tokens == demo_text(PROMPT, TOKENS)
    assert not written.avoided
    assert received_bytes(boot) - before > WHOLE_BYTES


def seek(connection: Connection, folder: str, host: Host, config: P2PConfig) -> None:
    """A peer that opens a stream to another one when it is told to, and says over which addresses it then has it."""
    run_on(host, folder, _seek(connection, config))


async def _seek(connection: Connection, config: P2PConfig) -> None:
    peer = await join_network(config, AnnouncementValidator())

    async def serve(stream: Any) -> None:
        await stream.discard_incoming()

    await peer.serve(serve)
    await asyncio.to_thread(wait_until, lambda: peer.reach.is_relayed and peer.reach.is_reachable)
    connection.send((peer.peer_id, peer.reach.whereabouts))
    peer_id, whereabouts = await asyncio.to_thread(connection.recv)
    peer._book.learn(peer_id, whereabouts)
    stream = await peer.open_stream(peer_id)
    connection.send([peer.reach.puncher.real_address(one) for one in await peer.reach.puncher._addresses_of(peer_id)])
    await asyncio.to_thread(connection.recv)  # "stop"
    stream.close()
    await peer.shutdown()


def test_two_homes_that_seek_each_other_at_once(homes):
    homes.bootstrap(homes.lab.host("boot", 2))
    config = P2PConfig(initial_peers=homes.swarm.bootstraps, host_maddrs=EVERYWHERE)
    places = [homes.lab.home(name, number) for name, number in (("a", 10), ("b", 11))]
    peers = [homes.start_process(Process, seek, place.machine, config) for place in places]
    found = [peer.receive() for peer in peers]
    for peer, other in zip(peers, reversed(found), strict=True):
        peer.connection.send(other)
    for peer, place in zip(peers, reversed(places), strict=True):
        (address,) = peer.receive()
        assert address.startswith(f"/ip4/{place.router.address}/tcp/")
        assert "p2p-circuit" not in address
