"""Addresses that are given by hand, and those that strangers announce and this peer would dial."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from swarm.errors import AddressUnavailable, InvalidOption, UsageError
from swarm.transport.addresses import (
    is_circuit,
    is_direct,
    is_ip,
    is_lan,
    is_loopback,
    parse_peers,
    sort_by_reach,
    validate_listen_addresses,
)

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"


def test_peers_are_stripped_and_empty_ones_left_out():
    named = f"/dns4/example.org/tcp/1/p2p/{PEER}"
    assert parse_peers([f" {ADDRESS}\n", "", "  ", named]) == (ADDRESS, named)
    with pytest.raises(InvalidOption, match="/p2p/PEER_ID"):
        parse_peers(["/ip4/127.0.0.1/tcp/31337"])


def test_what_is_no_multiaddress():
    for address in [
        "127.0.0.1:31337",
        PEER,
        "/ip4/300.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/70000",
        "/ip4/127.0.0.1/tcp/1/p2p/notapeerid",
    ]:
        with pytest.raises(InvalidOption):
            parse_peers([ADDRESS, address])


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
    validate_listen_addresses([address, "/ip4/192.0.2.1/tcp/0"])
    with pytest.raises(AddressUnavailable, match=r"192\.0\.2\.1"):  # no address of this machine
        validate_listen_addresses(["/ip4/192.0.2.1/tcp/4001"])


def test_what_cannot_be_listened_on():
    for address in ["tcp://0.0.0.0", "/dns4/localhost/tcp/31337"]:
        with pytest.raises(UsageError):
            validate_listen_addresses([address])


def test_loopback():
    for addresses, expected in [
        (["/ip4/127.0.0.1/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1"], False),
        (["/ip4/10.0.0.1/tcp/1"], False),
        (["/ip6/::/tcp/1"], False),
        (["/ip6/::1234:5678/tcp/1"], False),
    ]:
        assert is_loopback(addresses) is expected


def test_those_that_everybody_can_reach_come_first():
    everybody = ["/dns4/example.org/tcp/1", "/ip4/8.8.8.8/tcp/1", "/ip6/2001:4860:4860::8888/tcp/1"]
    this_network = ["/ip4/192.168.0.2/tcp/1", "/ip6/fe80::1/tcp/1"]
    this_machine = ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"]
    mixed = [*this_machine, *this_network, *everybody]
    assert sort_by_reach(mixed) == (*everybody, *this_network, *this_machine)
    assert sort_by_reach([]) == ()


OTHER = "12D3KooWQbphcfsRxrHeTc4HGod3GC6AvcVq5ARWk2cLKKHpYnhd"
PUBLIC = ["/ip4/8.8.8.8/tcp/31337", "/ip4/81.2.69.142/tcp/1", "/ip6/2a02:8071:b783::1/tcp/65535"]
LOCAL = ["/ip4/192.168.0.7/tcp/31337", "/ip4/10.0.0.7/tcp/1", "/ip4/100.64.0.1/tcp/1", "/ip6/fd00::1/tcp/1"]

THIS_MACHINE = [
    "/ip4/127.0.0.1/tcp/22",
    "/ip6/::1/tcp/22",
    "/ip4/0.0.0.0/tcp/22",  # Linux takes it for this machine
    "/ip6/::/tcp/22",
    "/ip6/::ffff:127.0.0.1/tcp/22",
    "/ip6/::ffff:7f00:1/tcp/22",
    "/ip4/224.0.0.1/tcp/1",  # of many machines
    "/ip4/255.255.255.255/tcp/1",
    "/ip6/ff02::1/tcp/1",
    "/ip6/fe80::1%eth0/tcp/1",  # means something on one machine only
    "/ip6/2a02::1%0/tcp/1",
]
ELSEWHERE = [
    "",
    "/",
    "/ip4/8.8.8.8/tcp/",
    "/ip4/8.8.8.8/tcp/0",
    "/ip4/8.8.8.8/tcp/65536",
    "/ip4/8.8.8.8/tcp/+1",
    "/ip4/8.8.8.8/tcp/1 ",
    "/ip4/8.8.8.8/tcp/1_0",
    "/ip4/8.8.8.8/tcp/²",
    "/ip4/8.8.8.8/tcp/1/",
    "//ip4/8.8.8.8/tcp/1",
    "/IP4/8.8.8.8/tcp/1",
    "/ip4/8.8.8.8/udp/1",
    "/ip4/8.8.8.8/udp/1/quic",
    "/ip4/8.8.8.8/tcp/1/tcp/2",
    f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}",
    "/ip6/8.8.8.8/tcp/1",
    "/ip4/2a02::1/tcp/1",
    "/ip4/08.8.8.8/tcp/1",
    "/dns4/swarm.example/tcp/1",
    "/dns/localhost/tcp/22",
    "/p2p-circuit",
]


def test_an_address_of_a_port_is_direct():
    for address in [*PUBLIC, *LOCAL]:
        assert is_direct(address)
        assert not is_circuit(address)
        assert is_lan(address) is (address in LOCAL)


def test_what_is_no_direct_address():
    for address in [*THIS_MACHINE, *ELSEWHERE]:
        assert not is_direct(address)
        assert not is_lan(address)
        assert not is_circuit(f"{address}/p2p/{PEER}/p2p-circuit")


def test_a_way_through_a_relay():
    for peer in [
        PEER,
        OTHER,
    ]:
        for address in [
            *PUBLIC,
            *LOCAL,
        ]:
            way = f"{address}/p2p/{peer}/p2p-circuit"
            assert is_circuit(way)
            assert not is_direct(way)
            assert not is_lan(way)


def test_what_is_no_way_through_a_relay():
    for way in [
        f"/p2p/{PEER}/p2p-circuit",
        f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}",
        f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/",
        f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{OTHER}",
        f"/ip4/8.8.8.8/tcp/1/ipfs/{PEER}/p2p-circuit",
        "/ip4/8.8.8.8/tcp/1/p2p//p2p-circuit",
        "/ip4/8.8.8.8/tcp/1/p2p/peer/p2p-circuit",
        f"/ip4/8.8.8.8/tcp/1/p2p/{PEER[:-1]}/p2p-circuit",
        f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}\n/p2p-circuit",
        "/ip4/8.8.8.8/tcp/1/p2p-circuit",
    ]:
        assert not is_circuit(way)
        assert not is_direct(way)


def test_what_is_no_ip_address():
    for host in [
        "",
        "8.8.8",
        "8.8.8.8 ",
        "08.8.8.8",
        "swarm.example",
        "fe80::1%\x1b[2J",
        "١.1.1.1",
    ]:
        assert not is_ip(host)
    assert all(map(is_ip, ["8.8.8.8", "127.0.0.1", "2a02::1", "::ffff:8.8.8.8"]))


NAMES = ["", "ip4", "ip6", "tcp", "udp", "p2p", "p2p-circuit", "dns4", "ws", PEER, OTHER, PEER[1:]]
VALUES = ["8.8.8.8", "127.0.0.1", "10.0.0.7", "2a02::1", "fe80::1", "1", "31337", "65536", "0", "00001"]
parts = st.sampled_from([*NAMES, *VALUES]) | st.text(max_size=6)
built = st.lists(parts, max_size=10).map("/".join)
nearly = st.tuples(st.sampled_from([*PUBLIC, *LOCAL]), built).map("".join)
texts = st.text(max_size=60) | built | built.map("/{}".format) | nearly


@given(texts)
@example("/ip4/8.8.8.8/tcp/" + "9" * 5000)
@example("/ip6/" + ":" * 300 + "/tcp/1")
def test_whatever_is_accepted_libp2p_reads_in_the_same_way_and_nothing_is_ever_raised(text):
    direct, circuit, lan = is_direct(text), is_circuit(text), is_lan(text)
    is_ip(text)
    assert not (direct and circuit)
    assert direct or not lan
    if direct or circuit:
        names = [protocol.name for protocol in Multiaddr(text).protocols()]
        assert names[0] in ("ip4", "ip6")
        assert names[1:] == (["tcp"] if direct else ["tcp", "p2p", "p2p-circuit"])
        assert text.isascii()
        assert text.isprintable()
        host = ip_address(Multiaddr(text)[names[0]])
        assert not host.is_loopback
        assert not (lan and host.is_global)
