"""Relays that end, lie or drop connections, and peers that ask others to dial back more than they should."""

from __future__ import annotations

import asyncio
import enum
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError

from swarm.client.routes.events import PromptComputed, RouteTaken
from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.dht.announcer import Announcer
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost, RemoteError
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.reach.circuit import RELAY_PROTOCOL_ID, HopMessage
from swarm.transport.reach.dial_back import BURST_OF_NETWORK, ask
from swarm.transport.reach.dialer import Dialer
from swarm.transport.reach.relay_places import MAX_LOSSES
from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, Nat, needs_root, received_bytes
from tests.homes.processes import EVERYWHERE, HomesSwarm, PeerAt, Process, relays_said, run_on
from tests.infos import server_info
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
MAX_PAUSE_S = 2.0


class Relays:
    """Three bootstrap peers, of which the last two relay, and a home that serves all blocks."""

    def __init__(self, homes: HomesSwarm, **limits: int) -> None:
        hosts = [homes.lab.host(name, number) for number, name in enumerate(("boot", "one", "two"), 2)]
        self.bootstrap = homes.bootstrap(hosts[0], relay=False)
        self.peers: dict[Host, PeerAt] = {}
        for host in hosts[1:]:
            self.peers[host] = homes.bootstrap(host, host_maddrs=EVERYWHERE, **limits)
        self.log = homes.log("server")
        self.server = homes.server(homes.lab.home("a", 10).machine, "0:12", self.log).wait_ready()
        self.client = homes.client(homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine)  # no hole can be punched

    def in_use(self) -> Host:
        """The relay by which the client and the home are connected, while a text is written."""
        before = {host: received_bytes(host) for host in self.peers}
        self.client.wait_for(len(self.client.times) + 40)
        used, *others = sorted(self.peers, key=lambda host: before[host] - received_bytes(host))
        received = [received_bytes(host) - before[host] for host in (used, *others)]
        assert received[0] > 5 * received[1], "neither relay carries the text alone"
        return used


def test_the_relay_in_use_is_killed_and_then_the_bootstrap_peer(homes):
    relays = Relays(homes)
    wait_until(lambda: [len(said) for said in relays_said(relays.log)[-1:]] == [len(relays.peers)])
    tokens = 400
    relays.client.begin(PROMPT[0].tolist(), tokens)
    relays.client.wait_for(60)
    used = relays.in_use()
    relays.peers[used].kill()
    assert relays.in_use() is not used
    before = relays.client.reconnects
    assert before == 1
    relays.bootstrap.kill()
    written = relays.client.finish()
    assert relays.client.reconnects == before
    assert written.tokens == demo_text(PROMPT, tokens)
    assert written.longest_pause < MAX_PAUSE_S
    assert not written.avoided


def test_a_relay_ends_connections_by_its_limits(homes):
    relays = Relays(homes, circuit_bytes=200_000)
    tokens = 700
    written = relays.client.write(PROMPT[0].tolist(), tokens)
    assert relays.client.reconnects, "no connection has come to its end"
    assert written.tokens == demo_text(PROMPT, tokens)
    assert written.longest_pause < MAX_PAUSE_S
    assert not written.avoided


def test_an_uplink_that_is_busy_for_seconds_costs_no_connection(homes):
    """What is said on the connection to the relay waits for what is sent by it."""
    homes.bootstrap(homes.lab.host("boot", 2))
    log = homes.log("server")
    places = [homes.lab.home(name, number, nat=Nat.SYMMETRIC) for name, number in (("a", 10), ("b", 11))]
    homes.server(places[0].machine, "0:12", log).wait_ready()
    client = homes.client(places[1].machine)
    assert client.write(PROMPT[0].tolist(), 1).tokens == demo_text(PROMPT, 1)
    for place in places:
        place.limit_uplink(500)
    written = client.write((PROMPT[0].tolist() * LONG)[:LONG], 1)
    assert [type(event) for event in written.events if not isinstance(event, PromptComputed)] == [RouteTaken]
    assert not client.reconnects
    assert len(relays_said(log)) == 1, "it has lost its relay"


LONG = 1000
"""Tokens, of which each has 192 numbers of four bytes: 12 s at 500 kbit/s."""
PERIOD_S = 5.0


class Badness(enum.Enum):
    """What a relay does that announces places."""

    REFUSES = "it grants none"
    DOES_NOT_CARRY = "it grants them, and carries no connections"
    DROPS = "it grants them, carries connections, and ends the one to the home when it is told to"


@dataclass
class BadRelay(Process):
    """Such a relay."""

    peer_id: str = ""

    def wait_ready(self) -> BadRelay:
        """Wait until it is announced."""
        self.peer_id = self.receive()
        return self

    @property
    def asked(self) -> int:
        """How often it was asked for a place."""
        self.connection.send("asked")
        return int(self.receive())

    def drop(self) -> None:
        """Have it end all its connections, but those to the initial peers, by which it is announced."""
        self.connection.send("drop")
        self.receive()


def run_bad_relay(
    connection: Connection, folder: str, host: Host, config: P2PConfig, badness: Badness, model: ModelInfo
) -> None:
    """The process of such a relay."""
    run_on(host, folder, _be_a_bad_relay(connection, config, badness, model))


async def _be_a_bad_relay(connection: Connection, config: P2PConfig, badness: Badness, model: ModelInfo) -> None:
    peer = await join_network(config, AnnouncementValidator())
    await peer.reach.known.wait()
    asked = 0

    async def answer(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        request = HopMessage.FromString(await reader.readexactly((await reader.readexactly(1))[0]))
        asked += request.type == 0
        status = 100 if badness is Badness.DOES_NOT_CARRY and request.type == 0 else 201
        body = HopMessage(type=2, status=status, reservation={"expire": int(time.time()) + 3600}).SerializeToString()
        writer.write(bytes([len(body)]) + body)
        await writer.drain()
        writer.close()

    def describe() -> ServerInfo:
        return server_info(0, 1, peer.peer_id, state=ServerState.JOINING, digests=(), relayed_peers=64)

    if badness is not Badness.DROPS:
        await peer._p2p.remove_binary_stream_handler(RELAY_PROTOCOL_ID)  # which refuses everything
        await peer._p2p.add_binary_stream_handler(RELAY_PROTOCOL_ID, answer)
    announcer = Announcer(peer, model, describe, PERIOD_S)
    await announcer.announce()
    announcer.start()
    connection.send(peer.peer_id)
    with suppress(EOFError, OSError):
        while (order := await asyncio.to_thread(connection.recv)) != "stop":
            if order == "drop":
                await _drop_all(peer, config.initial_peers)
            connection.send(asked)
    await announcer.stop()
    await peer.shutdown()


async def _drop_all(peer: Peer, spared: Sequence[str]) -> None:
    names = {address.rpartition("/p2p/")[2] for address in spared}
    for one in await peer._p2p.list_peers():
        if one.peer_id.to_base58() not in names:
            with suppress(P2PDaemonError, OSError):
                await peer._p2p._client.disconnect(one.peer_id)


TOKENS = 60
MODEL = ModelInfo("demo", 12, "main")
SETTLE_S = 60.0


def dial_announced(connection: Connection, folder: str, host: Host, config: P2PConfig, peer_id: str) -> None:
    """Dial each address at which a server is announced, as a stranger; tell which answer, and which do not."""
    connection.send(run_on(host, folder, _dial_announced(config, peer_id)))


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


FLOOD = 60


def count_connections(host: Host) -> None:
    """Count from now on who tries to connect to a machine."""
    rule = "type filter hook input priority -5\n tcp flags & (syn | ack) == syn counter"
    host.run("nft", "-f", "-", text=f"table ip counting {{\n chain incoming {{\n {rule}\n }}\n}}\n")


def connections(host: Host) -> int:
    """How many packets that open a connection have come, repeated ones too."""
    found = re.search(r"packets (\d+)", host.run("nft", "list", "table", "ip", "counting"))
    assert found is not None
    return int(found[1])


def flood(connection: Connection, folder: str, host: Host, config: P2PConfig) -> None:
    """Ask for many dials at once, and say what came of it."""
    run_on(host, folder, _flood(connection, config))


async def _flood(connection: Connection, config: P2PConfig) -> None:
    peer = await join_network(config, AnnouncementValidator())
    judge = config.initial_peers[0].rpartition("/p2p/")[2]
    connection.send("ready")
    await asyncio.to_thread(connection.recv)

    async def request(number: int) -> str:
        try:
            stream = await peer._streams.open_dial_back(judge)
            try:
                report = await ask(stream, [number + 1])
            finally:
                stream.close()
        except RemoteError as error:
            return error.code
        return f"dialed {report.host}"

    connection.send(Counter(await asyncio.gather(*map(request, range(FLOOD)))))
    await peer.shutdown()


def test_a_flood_of_requests_brings_a_few_dials_of_the_one_who_asks_and_none_of_others(homes):
    boot, evil, victim = (homes.lab.host(name, number) for number, name in enumerate(("boot", "evil", "victim"), 2))
    homes.bootstrap(boot)
    flooding = homes.start_process(Process, flood, evil, P2PConfig(initial_peers=homes.swarm.bootstraps))
    assert flooding.receive() == "ready"
    for host in (evil, victim):
        count_connections(host)
    flooding.connection.send("begin")
    outcomes = flooding.receive()
    dialed = outcomes.pop(f"dialed {evil.address}")
    dialed += outcomes.pop("peer_lost", 0)  # on a busy machine, where a dial takes longer than is waited for
    assert 0 < dialed <= BURST_OF_NETWORK + 2
    assert outcomes == {"request_refused": FLOOD - dialed}
    assert 0 < connections(evil) <= 3 * (BURST_OF_NETWORK + 2)
    assert connections(victim) == 0
