"""Homes that are reached directly: by a port that the router forwards, or by IPv6; and what becomes of that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import needs_root, needs_upnp
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 24
PORT = 31330


def write(client) -> None:
    """A whole text comes, and is right."""
    assert client.write(PROMPT[0].tolist(), TOKENS).tokens == demo_text(PROMPT, TOKENS)


@needs_upnp
def test_a_router_forwards_a_port_when_it_is_asked(homes):
    homes.bootstrap(homes.lab.host("boot", 2), relay=False)
    home, log = homes.lab.home("a", 10), homes.log("server")
    router = home.run_upnp(Path(homes.folder))
    try:
        homes.server(home.machine, "0:12", log).wait_ready()
        wait_until(lambda: "reached directly, through a port that the router forwards" in log.read_text(), 60.0)
        write(homes.client(homes.lab.host("away", 3)))
    finally:
        router.terminate()
        router.wait()


def test_a_port_is_forwarded_by_hand_and_closed_again(homes):
    """A client that cannot dial the server has it look again, and finds it through the relay soon."""
    homes.bootstrap(homes.lab.host("boot", 2))
    home, log = homes.lab.home("a", 10), homes.log("server")
    home.forward_port(PORT)
    homes.server(home.machine, "0:12", log, host_maddrs=(f"/ip4/0.0.0.0/tcp/{PORT}",)).wait_ready()
    assert f"reached directly, through a port that the router forwards, at /ip4/45.0.0.10/tcp/{PORT}" in log.read_text()
    write(homes.client(homes.lab.host("away", 3)))
    home.close_ports()
    write(homes.client(homes.lab.host("other", 4), wait_for_blocks=60.0))
    assert re.search(r"reached through relays .* forward TCP port 31330 ", log.read_text())


@pytest.mark.parametrize("lets_in", [True, False])
def test_ipv6(homes, lets_in):
    """Where the router lets IPv6 in, the server is dialed directly; those without IPv6 use a relay."""
    boot = homes.lab.host("boot", 2, ipv6=True)
    port = 31337
    peer = homes.peer(boot, host_maddrs=(f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"))
    four, six = (
        f"/{kind}/{host}/tcp/{port}/p2p/{peer.peer_id}"
        for kind, host in (("ip4", boot.address), ("ip6", boot.address6))
    )
    home, log = homes.lab.home("a", 10, ipv6=True, lets_in=lets_in), homes.log("server")
    homes.swarm.bootstraps = (six,)
    homes.server(home.machine, "0:12", log, host_maddrs=("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")).wait_ready()
    assert (f"reached directly, at /ip6/{home.machine.address6}/tcp/" in log.read_text()) is lets_in
    assert ("through relays" in log.read_text()) is True
    write(homes.client(homes.lab.host("six", 3, ipv6=True)))
    homes.swarm.bootstraps = (four,)
    write(homes.client(homes.lab.host("four", 4)))
