from __future__ import annotations

import pytest

from swarm.dht.reachability import is_relayed

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
RELAY = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
PUBLIC = f"/ip4/8.8.4.4/tcp/31337/p2p/{PEER}"
HERE = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"
HOME = f"/ip4/192.168.1.5/tcp/31337/p2p/{PEER}"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((), False),
        ((HERE,), False),
        ((HERE, HOME), False),
        ((HERE, HOME, PUBLIC), False),
        ((HERE, HOME, RELAY), True),
        ((RELAY,), True),
        ((RELAY, PUBLIC), False),
        ((RELAY, f"/dns4/swarm.example/tcp/31337/p2p/{PEER}"), False),
        ((f"/ip6/2a00:1450:4001::1/tcp/1/p2p/{PEER}", RELAY), False),
        ((f"/ip6/fe80::1/tcp/1/p2p/{PEER}", RELAY), True),
    ],
)
def test_who_needs_a_relay(addresses, expected):
    assert is_relayed(addresses) is expected
