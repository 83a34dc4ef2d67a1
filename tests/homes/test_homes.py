"""Homes behind routers that serve a swarm: reached directly, through relays, or in their own network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, Nat, needs_root, needs_upnp, received_bytes
from tests.homes.processes import EVERYWHERE, Failed
from tests.members import TestAuthority
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 24


def write(client, tokens: int = TOKENS) -> None:
    """A whole text comes, and is right."""
    assert client.write(PROMPT[0].tolist(), tokens).tokens == demo_text(PROMPT, tokens)


def test_from_the_start_of_a_home_to_the_text_of_a_client_elsewhere(homes):
    boot, away = homes.lab.host("boot", 2), homes.lab.host("away", 3)
    first, second, third = (homes.lab.home(name, number) for name, number in (("a", 10), ("b", 11), ("c", 12)))
    homes.bootstrap(boot)
    client = homes.client(away, wait_for_blocks=120.0)
    servers = [homes.server(first.machine, "0:6"), homes.server(second.machine, "6:12")]
    client.begin(PROMPT[0].tolist(), TOKENS)  # nobody serves yet
    for server in servers:
        server.wait_ready()
    written = client.finish()
    expected = demo_text(PROMPT, TOKENS)
    assert written.tokens == expected
    assert not written.avoided, "it was sent to a server that it could not reach"
    for place in (first.machine, third.machine):
        again = homes.client(place).write(PROMPT[0].tolist(), TOKENS)
        assert again.tokens == expected
        assert not again.avoided


PORT = 31330


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


SETTLE_S = 40.0
"""After a change of the network: to notice it, to have others dial back, to hold places, and to announce it."""


def test_a_router_that_restarts_and_one_that_moves_in_mid_text(homes):
    boot, away = homes.lab.host("boot", 2), homes.lab.host("away", 3)
    homes.bootstrap(boot)
    home = homes.lab.home("a", 10)
    server = homes.server(home.machine, "0:12", homes.log("server")).wait_ready()
    client = homes.client(away, wait_for_blocks=90.0)
    write(client)
    for change in (home.restart_router, lambda: home.change_outer_address("45.0.0.11")):
        tokens = 600
        client.begin(PROMPT[0].tolist(), tokens)
        client.wait_for(50)
        change()
        written = client.finish()
        assert written.tokens == demo_text(PROMPT, tokens)
        assert written.longest_pause < SETTLE_S
    assert "is used again" in homes.log("server").read_text(), "it has not noticed that its router has moved"
    assert server.works


def test_symmetric_nat(homes):
    homes.bootstrap(homes.lab.host("boot", 2))
    homes.server(homes.lab.home("a", 10, nat=Nat.SYMMETRIC).machine, "0:12", homes.log("server")).wait_ready()
    write(homes.client(homes.lab.host("away", 3)))
    write(homes.client(homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine))


def test_a_private_swarm_relays_for_its_members(homes):
    homes.swarm.membership = TestAuthority().invite()
    homes.bootstrap(homes.lab.host("boot", 2), relay=False)
    homes.server(homes.lab.host("relay", 3), "0:1").wait_ready()
    homes.server(homes.lab.home("a", 10, nat=Nat.SYMMETRIC).machine, "0:12", homes.log("server")).wait_ready()
    write(homes.client(homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine))


def test_a_home_that_nobody_relays_for_is_never_announced_as_online_until_somebody_does(homes):
    hosts = [homes.lab.host(name, number) for number, name in enumerate(("boot", "relay", "away"), 2)]
    homes.bootstrap(hosts[0], relay=False)
    log = homes.log("server")
    homes.server(homes.lab.home("a", 10).machine, "0:12", log).wait_ready()
    assert "not reached at all" in log.read_text()
    client = homes.client(hosts[2], wait_for_blocks=4.0)
    with pytest.raises(Failed, match="no online server announces them"):
        client.write(PROMPT[0].tolist(), 1)
    homes.server(hosts[1], "0:1").wait_ready()  # which relays
    wait_until(lambda: "Ready: serving blocks 0:12" in log.read_text())
    write(client)


LONG_TEXT = 300
HIDDEN_BYTES = 192 * 4
"""Of one token, in fp32: what each server sends, and the client."""


def test_machines_behind_one_router_use_no_relay_among_themselves_and_others_reach_them_all_the_same(homes):
    boot, away = homes.lab.host("boot", 2), homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine
    homes.bootstrap(boot)
    home = homes.lab.home("a", 10, machines=3)
    for server in [homes.server(home.machines[0], "0:6"), homes.server(home.machines[1], "6:12")]:
        server.wait_ready()
    at_home, outside = homes.client(home.machines[2]), homes.client(away)
    expected = demo_text(PROMPT, LONG_TEXT)

    def write(client) -> dict[Host, int]:
        """Write a text; how many bytes each machine has received meanwhile."""
        hosts = (*home.machines, home.router, boot)
        before = [received_bytes(host) for host in hosts]
        written = client.write(PROMPT[0].tolist(), LONG_TEXT)
        assert written.tokens == expected
        assert not written.avoided
        return {host: received_bytes(host) - old for host, old in zip(hosts, before, strict=True)}

    whole = LONG_TEXT * HIDDEN_BYTES
    received = write(at_home)
    assert all(received[machine] > whole for machine in home.machines)  # from client to server to server to client
    assert received[home.router] < whole / 2, "it went over the Internet"
    assert received[boot] < whole / 2, "it went over the relay"
    received = write(outside)  # which is what the above looks like if a relay is used
    assert received[boot] > whole
    assert received[home.router] > whole


def from_outside(host: Host, address: str) -> dict[str, str]:
    """What `swarm doctor` says about how a machine is reached."""
    command = (sys.executable, "-m", "swarm.cli", "doctor", "--json", "--initial-peers", address)
    done = subprocess.run(host.command(*command), capture_output=True, text=True, check=False, timeout=300)
    findings = json.loads(done.stdout)
    return next(finding for finding in findings if finding["check"] == "From outside")


def test_a_peer_says_by_which_addresses_others_join_and_doctor_how_this_machine_is_reached(homes):
    bootstrap = homes.bootstrap(homes.lab.host("boot", 2))
    machine, host = homes.lab.home("a", 10).machine, homes.lab.host("public", 3)
    with ThreadPoolExecutor() as pool:  # each waits for others more than it computes
        asked = [pool.submit(from_outside, one, bootstrap.addresses[0]) for one in (machine, host)]
        at_home, public = [one.result() for one in asked]
    assert at_home["verdict"] == "warning"
    assert "reached through relays" in at_home["found"]
    assert "forward TCP port" in at_home["remedy"]
    assert (public["verdict"], public["remedy"]) == ("ok", "")
    assert "reached directly, at /ip4/45.0.0.3/tcp/" in public["found"]
    assert homes.peer(machine, host_maddrs=EVERYWHERE).addresses[0] == bootstrap.addresses[0]
    assert homes.peer(host, host_maddrs=EVERYWHERE).addresses[0].startswith("/ip4/45.0.0.3/tcp/")
