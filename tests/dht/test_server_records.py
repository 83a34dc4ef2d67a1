from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ExitConfidence, ServerInfo, ServerState, Span, Whereabouts
from swarm.dht.server_records import (
    MAX_ADAPTERS,
    MAX_ADDRESSES,
    MAX_MODEL_BLOCKS,
    MAX_ROUND_TRIPS,
    decode_announcement,
    encode_announcement,
)
from swarm.errors import InvalidSpan, ProtocolViolation
from swarm.transport.addresses import is_circuit, is_direct, is_ip, is_lan
from swarm.transport.dht.records import MAX_PAYLOAD_BYTES
from tests.infos import server_info

DIGEST = "0123456789ab"
RECORD = {
    "model": "org/model",
    "peer_id": "QmPeer",
    "start": 2,
    "end": 4,
    "state": 2,
    "throughput": 10.5,
    "cache_tokens_free": 100,
    "revision": "main",
    "digests": [DIGEST, DIGEST],
    "compute_dtype": "float32",
    "quantization": "none",
    "version": "0.1",
    "name": "a friend",
    "forward_throughput": 200.0,
    "network_throughput": 300.0,
    "queue_delay": 0.5,
    "round_trips": [["QmNext", 0.1], ["QmOther", 0.0]],
    "relayed": True,
    "adapters": ["org/pirate"],
    "sparse": True,
    "perplexity_loss": 0.004,
    "exit_blocks": [3, 4],
    "exit_confidences": ["similarity", "softmax"],
}
OPTIONAL = (
    *("name", "forward_throughput", "network_throughput", "queue_delay", "round_trips", "relayed", "adapters"),
    "perplexity_loss",
)
"""Fields that a server may leave out."""

names = st.text(max_size=256)
digests = st.text("0123456789abcdef", min_size=12, max_size=12)


@st.composite
def servers(draw):
    span = Span(start := draw(st.integers(0, 40)), start + draw(st.integers(1, 40)))
    state = draw(st.sampled_from(ServerState))
    read = state is ServerState.ONLINE or draw(st.booleans())
    return ServerInfo(
        peer_id=draw(names),
        span=span,
        state=state,
        throughput=draw(st.floats(1e-3, 1e9)),
        cache_tokens_free=draw(st.integers(0, 2**48)),
        revision=draw(names),
        digests=tuple(draw(digests) for _ in range(span.length)) if read else (),
        compute_dtype=draw(names),
        quantization=draw(names),
        version=draw(names),
        name=draw(names),
        forward_throughput=draw(st.floats(0, 1e9)),
        network_throughput=draw(st.floats(0, 1e9)),
        queue_delay=draw(st.floats(0, 3600)),
        round_trips=tuple(draw(st.lists(st.tuples(names, st.floats(0, 3600)), max_size=5))),
        relayed=draw(st.booleans()),
        adapters=tuple(draw(st.lists(names, max_size=5))),
        sparse=(sparse := draw(st.booleans())),
        perplexity_loss=draw(st.none() | st.floats(-1, 1e3)) if sparse else None,
        exit_blocks=(exits := tuple(sorted(draw(st.sets(st.integers(span.start + 1, span.end), max_size=5))))),
        exit_confidences=tuple(
            draw(st.lists(st.sampled_from(get_args(ExitConfidence)), min_size=1, unique=True)) if exits else ()
        ),
    )


def packed(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**RECORD, **changes})


def without(field: str) -> bytes:
    return msgspec.msgpack.encode({name: value for name, value in RECORD.items() if name != field})


@given(servers())
@settings(deadline=None)
def test_what_a_server_announces_is_what_is_read(info):
    assert decode_announcement(encode_announcement("model", info)) == ("model", info)


def test_what_breaks_the_schema():
    decode_announcement(packed())  # the sample is right before it is spoiled
    decode_announcement(packed(state=1, digests=[]))  # a joining server has no digests yet
    for changes in [
        {"start": 4, "end": 2},
        {"start": 2, "end": 2},
        {"start": -1},
        {"end": MAX_MODEL_BLOCKS + 1},
        {"start": True},
        {"throughput": 0},
        {"throughput": math.inf},
        {"throughput": math.nan},
        {"throughput": 1e10},
        {"cache_tokens_free": -1},
        {"cache_tokens_free": 2**48 + 1},
        {"state": 3},
        {"digests": [DIGEST]},
        {"digests": []},
        {"digests": [DIGEST, DIGEST[:-1]]},
        {"digests": [DIGEST, DIGEST.upper()]},
        {"digests": [DIGEST, DIGEST + "\n"]},
        {"state": 1, "digests": [DIGEST]},
        {"peer_id": "Q" * 257},
        {"exit_blocks": [2]},
        {"exit_blocks": [5]},
        {"exit_blocks": [4, 3]},
        {"exit_blocks": [3, 3]},
        {"exit_blocks": []},
        {"exit_confidences": []},
        {"exit_confidences": ["softmax", "softmax"]},
        {"exit_confidences": ["guess"]},
        {"sparse": 1},
        {"sparse": False},
        {"perplexity_loss": math.nan},
        {"perplexity_loss": -1.1},
        {"name": "n" * 257},
        {"forward_throughput": -1.0},
        {"forward_throughput": math.nan},
        {"network_throughput": 1e10},
        {"queue_delay": -0.1},
        {"queue_delay": 3601.0},
        {"round_trips": [["QmNext", -0.1]]},
        {"round_trips": [["QmNext", math.nan]]},
        {"round_trips": [["QmNext", 0.1, 0.1]]},
        {"round_trips": [["Q" * 257, 0.1]]},
        {"round_trips": {"QmNext": 0.1}},
        {"round_trips": [["QmNext", 0.1]] * (MAX_ROUND_TRIPS + 1)},
        {"relayed": 1},
        {"adapters": ["a" * 257]},
        {"adapters": ["a"] * (MAX_ADAPTERS + 1)},
        {"future": "field"},
        {"shares_weights": 1},
    ]:
        with pytest.raises(ProtocolViolation):
            decode_announcement(packed(**changes))


def test_what_may_not_be_missing():
    for field in [name for name in RECORD if name not in OPTIONAL]:
        with pytest.raises(ProtocolViolation, match=field):
            decode_announcement(without(field))


def test_what_a_server_may_leave_out():
    for field, default in list(zip(OPTIONAL, ("", 0.0, 0.0, 0.0, (), False, (), None), strict=True)):
        assert getattr(decode_announcement(without(field))[1], field) == default


def test_peers_of_the_former_version_read_what_has_nothing_new():
    _, info = decode_announcement(without("relayed"))
    fields = msgspec.msgpack.decode(encode_announcement("model", dataclasses.replace(info, adapters=())))
    assert not {"relayed", "adapters", "mobility"} & set(fields)


def test_no_record_at_all():
    for data in [
        b"",
        b"\x90",
        b"\x91" * 60_000,
        b"\x81\xa7peer_id" + b"\x91" * 60_000,
        b"\xdf\xff\xff\xff\xff",
        packed() + b"\x00",
        packed().replace(b"QmPeer", b"Qm\xff\xfeer"),
    ]:
        with pytest.raises(ProtocolViolation):
            decode_announcement(data)


def test_an_oversized_record_is_not_even_parsed():
    with pytest.raises(ProtocolViolation, match="too large"):
        decode_announcement(b"\x00" * (MAX_PAYLOAD_BYTES + 1))


def test_the_span_of_a_large_model_fits_with_all_neighbors():
    peers = tuple((f"Qm{number:044}", 0.1) for number in range(MAX_ROUND_TRIPS))
    info = server_info(0, 256, "Qm" + "x" * 44, digests=(DIGEST,) * 256, round_trips=peers)
    assert decode_announcement(encode_announcement("org/model", info)) == ("org/model", info)


def test_of_a_record_that_is_too_long_adapters_are_left_out_and_then_round_trips():
    name = "\u00fc" * 256
    info = server_info(0, 200, name, digests=(DIGEST,) * 200, adapters=(name,) * MAX_ADAPTERS)
    _, read = decode_announcement(encode_announcement(name, info))
    assert 0 < len(read.adapters) < MAX_ADAPTERS
    assert dataclasses.replace(read, adapters=info.adapters) == info
    info = dataclasses.replace(info, round_trips=((name, 0.1),) * MAX_ROUND_TRIPS)
    _, read = decode_announcement(encode_announcement(name, info))
    assert read.adapters == ()
    assert 0 < len(read.round_trips) < MAX_ROUND_TRIPS


def test_a_span_whose_digests_do_not_fit():
    info = server_info(0, MAX_MODEL_BLOCKS, digests=(DIGEST,) * MAX_MODEL_BLOCKS)
    with pytest.raises(InvalidSpan, match="hold fewer blocks"):
        encode_announcement("model", info)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_garbage_never_raises_anything_else(data):
    with contextlib.suppress(ProtocolViolation):
        assert isinstance(decode_announcement(data)[1], ServerInfo)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_record_never_raises_anything_else(data):
    record = bytearray(packed())
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolViolation):
        assert isinstance(decode_announcement(bytes(record))[1], ServerInfo)


ANNOUNCED = msgspec.msgpack.decode(encode_announcement("model", server_info(2, 4)))


def announced(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**ANNOUNCED, **changes})


def test_who_says_nothing_of_it_does_not_share():
    assert "shares_weights" not in ANNOUNCED
    assert not decode_announcement(msgspec.msgpack.encode(ANNOUNCED))[1].shares_weights


PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PUBLIC = "/ip4/81.2.69.142/tcp/31337"
RELAYED = f"/ip4/8.8.8.8/tcp/31337/p2p/{PEER}/p2p-circuit"
LAN = "/ip4/192.168.0.7/tcp/31337"

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


@given(whereabouts, st.booleans(), st.integers(0, 2**16))
def test_where_a_server_says_that_it_is_there_it_is_looked_for(where, is_relayed, relayed_peers):
    info = server_info(2, 4, whereabouts=where, relayed=is_relayed, relayed_peers=relayed_peers)
    assert decode_announcement(encode_announcement("model", info)) == ("model", info)


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
        "/ip6/::1/tcp/22",
        "/ip4/0.0.0.0/tcp/22",
        "/ip6/::ffff:127.0.0.1/tcp/22",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dns4/swarm.example/tcp/31337",
        "/ip4/81.2.69.142/tcp/0",
        "/ip4/81.2.69.142/udp/1/quic",
        "/unix/tmp/socket",
        f"{PUBLIC}/p2p/{PEER}",
        f"{PUBLIC}/",
        f"{RELAYED}/p2p/{PEER}",
        f"{RELAYED}/p2p-circuit",
        f"/ip4/127.0.0.1/tcp/22/p2p/{PEER}/p2p-circuit",
        f"{PUBLIC}/p2p/nobody/p2p-circuit",
        f"/ip4/81.2.69.142/tcp/1{'/' * 240}",
    ]:
        for field in ("addresses", "lan_addresses"):
            with pytest.raises(ProtocolViolation):
                decode_announcement(announced(**{field: [address]}))
        for field, good in (("addresses", PUBLIC), ("lan_addresses", LAN)):
            with pytest.raises(ProtocolViolation):
                decode_announcement(announced(**{field: [good, address]}))


def test_whereabouts_that_break_the_schema():
    for changes in [
        {"lan_addresses": [PUBLIC]},
        {"lan_addresses": [RELAYED]},
        {"lan_addresses": [f"{LAN}/p2p/{PEER}/p2p-circuit"]},
        {"addresses": [PUBLIC] * (MAX_ADDRESSES + 1)},
        {"lan_addresses": [LAN] * (MAX_ADDRESSES + 1)},
        {"addresses": PUBLIC},
        {"addresses": [PUBLIC.encode()]},
        {"addresses": ["/ip4/81.2.69.142/tcp/" + "1" * 256]},
        {"outer_host": "swarm.example"},
        {"outer_host": "81.2.69.142/tcp/1"},
        {"outer_host": "fe80::1%\x1b[2J"},
        {"outer_host": "1" * 46},
        {"relayed_peers": -1},
        {"relayed_peers": 2**16 + 1},
        {"relayed_peers": True},
    ]:
        assert decode_announcement(
            announced(addresses=[PUBLIC, RELAYED], lan_addresses=[LAN], outer_host="81.2.69.142")
        )
        with pytest.raises(ProtocolViolation):
            decode_announcement(announced(**changes))


addresses = st.lists(
    st.sampled_from([PUBLIC, RELAYED, LAN]) | st.text(max_size=40) | public.map("{}/ws".format), max_size=8
)


@given(addresses, addresses, outer_hosts | st.text(max_size=50))
def test_whatever_is_believed_can_be_dialed(everywhere, lan, outer_host):
    with contextlib.suppress(ProtocolViolation):
        data = announced(addresses=everywhere, lan_addresses=lan, outer_host=outer_host)
        found = decode_announcement(data)[1].whereabouts
        assert all(is_direct(one) or is_circuit(one) for one in found.addresses)
        assert all(map(is_lan, found.lan_addresses))
        assert found.outer_host == "" or is_ip(found.outer_host)
        assert len(found.addresses) <= MAX_ADDRESSES
