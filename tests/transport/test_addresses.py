from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import AddressUnavailable, InvalidOption, UsageError
from swarm.transport.addresses import is_loopback, parse_peers, sort_by_reach, validate_listen_addresses

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"


def test_peers_are_stripped_and_empty_ones_left_out():
    assert parse_peers([f" {ADDRESS}\n", "", "  "]) == (ADDRESS,)


@pytest.mark.parametrize(
    "address",
    [
        ADDRESS,
        f"/ip6/::1/tcp/1/p2p/{PEER}",
        f"/dns4/example.org/tcp/1/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/1/quic/p2p/{PEER}",
    ],
)
def test_addresses_of_every_kind(address):
    assert parse_peers([address]) == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:31337",
        "http://127.0.0.1",
        PEER,
        "/ip4/300.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/70000",
        "/ip4/127.0.0.1/tcp/1/p2p/notapeerid",
        "/nonsense/1",
        "/",
    ],
)
def test_what_is_no_multiaddress(address):
    with pytest.raises(InvalidOption):
        parse_peers([ADDRESS, address])


@given(st.text(min_size=1).filter(str.strip))
@settings(deadline=None)
def test_any_text_is_a_peer_or_refused(text):
    with pytest.raises(InvalidOption):
        parse_peers([text])


def test_an_address_without_a_peer_id():
    with pytest.raises(InvalidOption, match="/p2p/PEER_ID"):
        parse_peers(["/ip4/127.0.0.1/tcp/31337"])


@pytest.mark.parametrize("family", ["ip4", "ip6"])
def test_a_taken_tcp_port(family):
    host = "127.0.0.1" if family == "ip4" else "::1"
    with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        taken.listen(1)
        address = f"/{family}/{host}/tcp/{taken.getsockname()[1]}"
        with pytest.raises(AddressUnavailable, match="another program is listening there"):
            validate_listen_addresses(["/ip4/127.0.0.1/tcp/0", address])
    validate_listen_addresses([address])  # free again, and checking it has not taken it
    validate_listen_addresses([address])


def test_a_taken_udp_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/udp/{taken.getsockname()[1]}/quic"
        with pytest.raises(AddressUnavailable):
            validate_listen_addresses([address])


def test_an_address_of_another_machine():
    with pytest.raises(AddressUnavailable, match=r"192\.0\.2\.1"):  # reserved for documentation
        validate_listen_addresses(["/ip4/192.0.2.1/tcp/4001"])


def test_any_port_will_do():
    validate_listen_addresses(["/ip4/127.0.0.1/tcp/0", "/ip4/192.0.2.1/tcp/0"])


@pytest.mark.parametrize("address", ["tcp://0.0.0.0", "/dns4/localhost/tcp/31337", "/dns/localhost/tcp/31337"])
def test_what_cannot_be_listened_on(address):
    with pytest.raises(UsageError):
        validate_listen_addresses([address])


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["/ip4/127.0.0.1/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1"], False),
        (["/ip4/10.0.0.1/tcp/1"], False),
        (["/ip6/::/tcp/1"], False),
        (["/ip6/::1234:5678/tcp/1"], False),
    ],
)
def test_loopback(addresses, expected):
    assert is_loopback(addresses) is expected


def test_those_that_everybody_can_reach_come_first():
    everybody = ["/dns4/example.org/tcp/1", "/ip4/8.8.8.8/tcp/1", "/ip6/2001:4860:4860::8888/tcp/1"]
    this_network = ["/ip4/192.168.0.2/tcp/1", "/ip6/fe80::1/tcp/1"]
    this_machine = ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"]
    mixed = [*this_machine, *this_network, *everybody]
    assert sort_by_reach(mixed) == (*everybody, *this_network, *this_machine)
    assert sort_by_reach([]) == ()
