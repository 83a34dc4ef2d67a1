"""Relays that lie or drop cost a home nothing but a little time."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import uvloop

from swarm.data_structures import ModelInfo
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig
from swarm.transport.reach.dialer import Dialer
from swarm.transport.reach.relay_places import MAX_LOSSES
from tests.disturbances import demo_prompt, demo_text
from tests.homes.bad_relays import Badness, BadRelay, run_bad_relay
from tests.homes.laboratory import Host, needs_root
from tests.homes.processes import EVERYWHERE, Process, relays_said
from tests.server_process import prepare
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 60
MODEL = ModelInfo("demo", 12, "main")
SETTLE_S = 60.0


def dial_announced(connection: Connection, folder: str, host: Host, config: P2PConfig, peer_id: str) -> None:
    """Dial each address at which a server is announced, as a stranger; tell which answer, and which do not."""
    prepare(folder)
    host.enter()
    connection.send(uvloop.run(_dial_announced(config, peer_id)))


async def _dial_announced(config: P2PConfig, peer_id: str) -> dict[str, bool]:
    peer, dialer = await join_network(config, AnnouncementValidator()), Dialer()
    try:
        servers = await fetch_servers(peer.dht, MODEL.name, MODEL.blocks)
        (announced,) = [server.whereabouts.addresses for server in servers if server.peer_id == peer_id]
        answers = {}
        for address in announced:
            try:
                await dialer.dial(peer_id, address)
                answers[address] = True
            except PeerLost:
                answers[address] = False
        return answers
    finally:
        await dialer.close()
        await peer.shutdown()


def test_a_home_ends_with_places_at_honest_relays_and_nothing_is_sent_to_it_in_vain(homes):
    """Servers are asked before bootstrap peers, so all that lie are asked first."""
    lab = homes.lab
    honest = [homes.bootstrap(lab.host(name, number)) for number, name in enumerate(("one", "two"), 2)]
    bad = {}
    for number, badness in enumerate(Badness, 4):
        config = P2PConfig(homes.swarm.bootstraps, EVERYWHERE, relay=badness is Badness.DROPS)
        host = lab.host(badness.name.lower().replace("_", ""), number)
        bad[badness] = homes.start_process(BadRelay, run_bad_relay, host, config, badness, MODEL)
    for relay in bad.values():
        relay.wait_ready()
    log, away = homes.log("server"), lab.host("away", 10)
    server = homes.server(lab.home("a", 20).machine, "0:12", log)
    client = homes.client(away)
    server.wait_ready()
    names = {f"…{relay.peer_id[-6:]}" for relay in honest}

    named = {badness: f"…{relay.peer_id[-6:]}" for badness, relay in bad.items()}
    dropping = named[Badness.DROPS]

    def is_given_up() -> bool:
        return f"Relay {dropping} is lost" in log.read_text()

    def is_held_again(drops: int) -> bool:
        regained = log.read_text().count(f"Relay {dropping} was lost, and is used again")
        return regained >= drops and any(dropping in relays for relays in relays_said(log)[-1:])

    for drops in range(MAX_LOSSES):
        wait_until(lambda drops=drops: is_held_again(drops) or is_given_up(), SETTLE_S)
        bad[Badness.DROPS].drop()
    wait_until(lambda: is_given_up() and relays_said(log)[-1:] == [names], SETTLE_S)
    written = client.write(PROMPT[0].tolist(), TOKENS)
    assert written.tokens == demo_text(PROMPT, TOKENS)
    assert not written.avoided, "it was sent to a server that it could not reach"
    liars = {Badness.REFUSES, Badness.DOES_NOT_CARRY}
    assert not any(named[badness] in relays for badness in liars for relays in relays_said(log)), "a liar was announced"
    assert all(bad[badness].asked for badness in liars)
    dialing = homes.start_process(Process, dial_announced, away, P2PConfig(homes.swarm.bootstraps), server.peer_id)
    answers = dialing.receive()
    assert len(answers) >= len(honest)  # the one that drops is tried again after a while
    assert all(answers.values()), answers
