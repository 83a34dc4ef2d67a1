"""Machines behind one router talk to each other in their own network, not by a relay."""

from __future__ import annotations

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Host, needs_root, received_bytes

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 300
HIDDEN_BYTES = 192 * 4
"""Of one token, in fp32: what each server sends, and the client."""


def test_machines_behind_one_router_use_no_relay_among_themselves_and_others_reach_them_all_the_same(homes):
    boot, away = homes.lab.host("boot", 2), homes.lab.host("away", 3)
    homes.bootstrap(boot)
    home = homes.lab.home("a", 10, machines=3)
    for server in [homes.server(home.machines[0], "0:6"), homes.server(home.machines[1], "6:12")]:
        server.wait_ready()
    at_home, outside = homes.client(home.machines[2]), homes.client(away)
    expected = demo_text(PROMPT, TOKENS)

    def write(client) -> dict[Host, int]:
        """Write a text; how many bytes each machine has received meanwhile."""
        hosts = (*home.machines, home.router, boot)
        before = [received_bytes(host) for host in hosts]
        written = client.write(PROMPT[0].tolist(), TOKENS)
        assert written.tokens == expected
        assert not written.avoided
        return {host: received_bytes(host) - old for host, old in zip(hosts, before, strict=True)}

    whole = TOKENS * HIDDEN_BYTES
    received = write(at_home)
    assert all(received[machine] > whole for machine in home.machines)  # from client to server to server to client
    assert received[home.router] < whole / 2, "it went over the Internet"
    assert received[boot] < whole / 2, "it went over the relay"
    received = write(outside)  # which is what the above looks like if a relay is used
    assert received[boot] > whole
    assert received[home.router] > whole
