"""Real processes whose peers in the DHT hang: they accept connections, and never answer."""

from __future__ import annotations

import time

import httpx
import pytest

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import P2PConfig
from tests.gateways import run_gateway
from tests.swarms import LOOPBACK, run_swarm
from tests.waiting import wait_until

HUNG_S = 60.0
"""An answer that takes longer hangs: a look-up ends within 10 s, and the refresh of a snapshot within 15 s."""

ALL_HANG_S = 30.0
"""Beyond the lifetime of the servers' announcements, and the gateway's next refresh."""

BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


@pytest.mark.slow
def test_a_server_starts_and_a_gateway_says_whether_it_is_ready_while_the_dht_hangs():
    with run_swarm(DEMO_FOLDER, ("0:12", "0:12")) as swarm, run_gateway(swarm) as gateway:
        works, hangs = swarm.servers

        def status() -> int:
            return httpx.get(f"{gateway.url}/readyz", timeout=HUNG_S).status_code

        def answer() -> str:
            reply = httpx.post(f"{gateway.api}/completions", json=BODY, timeout=4 * HUNG_S)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["text"])

        story = answer()
        assert status() == 200
        hangs.freeze()
        known = P2PConfig(initial_peers=(hangs.addresses[0], works.addresses[0]), host_maddrs=LOOPBACK)
        third = swarm.start("0:12", p2p=known).wait_ready()
        assert status() == 200
        assert answer() == story
        for server in (works, third):
            server.freeze()
        began = time.monotonic()
        while time.monotonic() - began < ALL_HANG_S:
            assert status() in (200, 503)  # whichever it is, it is said
            time.sleep(1.0)
        for server in swarm.servers:
            server.thaw()
        wait_until(lambda: status() == 200)
        assert answer() == story
