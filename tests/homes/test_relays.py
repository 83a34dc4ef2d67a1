"""Relays that end, or end connections, while a text is written."""

from __future__ import annotations

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, needs_root, received_bytes
from tests.homes.processes import EVERYWHERE, HomesSwarm, PeerAt, relays_said
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
MAX_PAUSE_S = 2.0


class Relays:
    """Three bootstrap peers, of which the last two relay, and a home that serves all blocks."""

    def __init__(self, homes: HomesSwarm, **limits: object) -> None:
        hosts = [homes.lab.host(name, number) for number, name in enumerate(("boot", "one", "two"), 2)]
        self.bootstrap = homes.bootstrap(hosts[0], relay=False)
        self.peers: dict[Host, PeerAt] = {}
        for host in hosts[1:]:
            self.peers[host] = homes.bootstrap(host, host_maddrs=EVERYWHERE, relay_limits=limits)
        self.log = homes.log("server")
        self.server = homes.server(homes.lab.home("a", 10).machine, "0:12", self.log).wait_ready()
        self.client = homes.client(homes.lab.host("away", 5))

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
    relays = Relays(homes, relayDataLimit=200_000)
    tokens = 700
    written = relays.client.write(PROMPT[0].tolist(), tokens)
    assert relays.client.reconnects, "no connection has come to its end"
    assert written.tokens == demo_text(PROMPT, tokens)
    assert written.longest_pause < MAX_PAUSE_S
    assert not written.avoided
