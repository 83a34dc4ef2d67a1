"""Where announcements say that their servers can be dialed."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Whereabouts
from swarm.dht.server_records import MAX_ADDRESSES, decode_announcement, encode_announcement
from swarm.errors import ProtocolViolation
from swarm.transport.addresses import is_circuit, is_direct, is_ip, is_lan
from swarm.transport.dht.records import MAX_PAYLOAD_BYTES
from tests.infos import server_info

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PUBLIC = "/ip4/81.2.69.142/tcp/31337"
RELAYED = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}/p2p-circuit"
LAN = "/ip4/192.168.0.7/tcp/31337"
RECORD = msgspec.msgpack.decode(encode_announcement("model", server_info(2, 4)))

public = st.builds(
    "/ip4/{}.{}.{}.1/tcp/{}".format,
    st.integers(11, 99),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(1, 65535),
)
local = st.builds("/ip4/10.0.{}.{}/tcp/{}".format, st.integers(0, 255), st.integers(0, 255), st.integers(1, 65535))
relayed = public.map(lambda address: f"{address}/p2p/{PEER}/p2p-circuit")
outer_hosts = st.just("") | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)
whereabouts = st.builds(
    Whereabouts,
    st.lists(public | relayed | local, max_size=MAX_ADDRESSES).map(tuple),
    st.lists(local, max_size=MAX_ADDRESSES).map(tuple),
    outer_hosts,
)


def packed(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**RECORD, **changes})


@given(whereabouts, st.booleans(), st.integers(0, 2**16))
def test_where_a_server_says_that_it_is_there_it_is_looked_for(where, is_relayed, relayed_peers):
    info = server_info(2, 4, whereabouts=where, relayed=is_relayed, relayed_peers=relayed_peers)
    assert decode_announcement(encode_announcement("model", info)) == ("model", info)


def test_who_says_nothing_of_it_is_found_by_libp2p_itself():
    _, info = decode_announcement(packed())
    assert (info.whereabouts, info.relayed, info.relayed_peers) == (Whereabouts(), False, 0)
    assert not {"addresses", "lan_addresses", "outer_host", "relayed_peers"} & set(RECORD)


def test_of_too_many_addresses_the_first_are_announced():
    ports = range(1, MAX_ADDRESSES + 4)
    many = Whereabouts(
        tuple(f"/ip4/8.8.8.8/tcp/{port}" for port in ports), tuple(f"/ip4/10.0.0.7/tcp/{port}" for port in ports)
    )
    _, info = decode_announcement(encode_announcement("model", server_info(0, 2, whereabouts=many)))
    assert info.whereabouts == Whereabouts(many.addresses[:MAX_ADDRESSES], many.lan_addresses[:MAX_ADDRESSES])


def test_the_longest_whereabouts_fit_into_a_record_of_many_blocks():
    six = "/ip6/2a02:8071:b783:ffff:ffff:ffff:ffff:ffff/tcp/65535"
    local_six = "/ip6/fd00:8071:b783:ffff:ffff:ffff:ffff:ffff/tcp/65535"
    where = Whereabouts(
        (f"{six}/p2p/{PEER}/p2p-circuit",) * MAX_ADDRESSES, (local_six,) * MAX_ADDRESSES, six.split("/")[2]
    )
    info = server_info(0, 256, digests=("0123456789ab",) * 256, whereabouts=where, relayed=True)
    encoded = encode_announcement("org/model", info)
    assert len(encoded) < MAX_PAYLOAD_BYTES
    assert decode_announcement(encoded) == ("org/model", info)


def test_what_others_must_not_be_made_to_dial():
    for address in [
        "",
        "81.2.69.142:31337",
        "/ip4/127.0.0.1/tcp/22",
        "/ip4/127.1.2.3/tcp/22",
        "/ip6/::1/tcp/22",
        "/ip4/0.0.0.0/tcp/22",
        "/ip6/::/tcp/22",
        "/ip6/::ffff:127.0.0.1/tcp/22",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dns4/swarm.example/tcp/31337",
        "/dns/localhost/tcp/22",
        "/dnsaddr/swarm.example",
        "/ip4/81.2.69.142/tcp/0",
        "/ip4/81.2.69.142/tcp/65536",
        "/ip4/81.2.69.142/tcp/00000170000",
        "/ip4/81.2.69.142/udp/1/quic",
        "/unix/tmp/socket",
        f"{PUBLIC}/p2p/{PEER}",
        f"{PUBLIC}/",
        f"{PUBLIC}/ws",
        f"/p2p/{PEER}",
        f"{RELAYED}/p2p/{PEER}",
        f"{RELAYED}/p2p/{PEER}/p2p-circuit",
        f"{RELAYED}/p2p-circuit",
        f"{RELAYED}/",
        f"/dns4/swarm.example/tcp/1/p2p/{PEER}/p2p-circuit",
        f"/ip4/127.0.0.1/tcp/22/p2p/{PEER}/p2p-circuit",
        f"{PUBLIC}/p2p/nobody/p2p-circuit",
        f"/ip4/81.2.69.142/tcp/1{'/' * 240}",
    ]:
        for field in ("addresses", "lan_addresses"):
            with pytest.raises(ProtocolViolation):
                decode_announcement(packed(**{field: [address]}))
        for field, good in (("addresses", PUBLIC), ("lan_addresses", LAN)):
            with pytest.raises(ProtocolViolation):
                decode_announcement(packed(**{field: [good, address]}))


def test_what_breaks_the_schema():
    for changes in [
        {"lan_addresses": [PUBLIC]},
        {"lan_addresses": [RELAYED]},
        {"lan_addresses": [f"{LAN}/p2p/{PEER}/p2p-circuit"]},
        {"addresses": [PUBLIC] * (MAX_ADDRESSES + 1)},
        {"lan_addresses": [LAN] * (MAX_ADDRESSES + 1)},
        {"addresses": PUBLIC},
        {"addresses": None},
        {"addresses": [PUBLIC.encode()]},
        {"addresses": [None]},
        {"addresses": [[PUBLIC]]},
        {"addresses": {PUBLIC: PUBLIC}},
        {"addresses": ["/ip4/81.2.69.142/tcp/" + "1" * 256]},
        {"outer_host": "swarm.example"},
        {"outer_host": "81.2.69.142/tcp/1"},
        {"outer_host": " 81.2.69.142"},
        {"outer_host": "81.2.69.142\n"},
        {"outer_host": "fe80::1%eth0"},
        {"outer_host": "fe80::1%\x1b[2J"},
        {"outer_host": "1" * 46},
        {"outer_host": 1359103374},
        {"outer_host": None},
        {"relayed_peers": -1},
        {"relayed_peers": 2**16 + 1},
        {"relayed_peers": 1.5},
        {"relayed_peers": True},
        {"relayed_peers": "64"},
        {"relayed_peers": None},
    ]:
        assert decode_announcement(packed(addresses=[PUBLIC, RELAYED], lan_addresses=[LAN], outer_host="81.2.69.142"))
        with pytest.raises(ProtocolViolation):
            decode_announcement(packed(**changes))


addresses = st.lists(
    st.sampled_from([PUBLIC, RELAYED, LAN]) | st.text(max_size=40) | public.map("{}/ws".format), max_size=8
)


@given(addresses, addresses, outer_hosts | st.text(max_size=50))
def test_whatever_is_believed_can_be_dialed(everywhere, lan, outer_host):
    with contextlib.suppress(ProtocolViolation):
        data = packed(addresses=everywhere, lan_addresses=lan, outer_host=outer_host)
        found = decode_announcement(data)[1].whereabouts
        assert all(is_direct(one) or is_circuit(one) for one in found.addresses)
        assert all(map(is_lan, found.lan_addresses))
        assert found.outer_host == "" or is_ip(found.outer_host)
        assert len(found.addresses) <= MAX_ADDRESSES
