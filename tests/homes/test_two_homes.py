"""Two homes serve one chain, and everybody can use it."""

from __future__ import annotations

import pytest

from tests.disturbances import demo_prompt, demo_text
from tests.homes.laboratory import needs_root

pytestmark = [pytest.mark.slow, needs_root]

PROMPT = demo_prompt()
TOKENS = 24


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
