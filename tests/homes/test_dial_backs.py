"""Nobody can have strangers dialed, or have a peer dial more than a little."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from multiprocessing.connection import Connection

import pytest
import uvloop

from swarm.dht.validation import AnnouncementValidator
from swarm.errors import RemoteError
from swarm.transport.joining import join_network
from swarm.transport.p2p import P2PConfig
from swarm.transport.reach.dial_back import BURST_OF_NETWORK, ask
from tests.homes.laboratory import Host, needs_root
from tests.homes.processes import Process
from tests.server_process import prepare

pytestmark = [pytest.mark.slow, needs_root]

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
    prepare(folder)
    host.enter()
    uvloop.run(_flood(connection, config))


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
