"""Routers that forget, move, or let nothing be guessed; and homes that nothing relays for."""

from __future__ import annotations

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import Nat, needs_root
from tests.homes.processes import Failed, HomesSwarm
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 24
SETTLE_S = 40.0
"""After a change of the network: to notice it, to have others dial back, to hold places, and to announce it."""


def write(homes: HomesSwarm, client, tokens: int = TOKENS) -> None:
    """A whole text comes, and is right."""
    assert client.write(PROMPT[0].tolist(), tokens).tokens == demo_text(PROMPT, tokens)


def test_a_router_that_restarts_and_one_that_moves_in_mid_text(homes):
    boot, away = homes.lab.host("boot", 2), homes.lab.host("away", 3)
    homes.bootstrap(boot)
    home = homes.lab.home("a", 10)
    server = homes.server(home.machine, "0:12", homes.log("server")).wait_ready()
    client = homes.client(away, wait_for_blocks=90.0)
    write(homes, client)
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
    write(homes, homes.client(homes.lab.host("away", 3)))
    write(homes, homes.client(homes.lab.home("b", 11, nat=Nat.SYMMETRIC).machine))


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
    write(homes, client)
