"""Messages between a ring's starter and its workers."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation
from swarm.protocol import messages
from swarm.protocol.framing import MAX_HEADER_BYTES
from swarm.protocol.messages.fields import MAX_BLOCKS_PER_REQUEST
from swarm.protocol.messages.peers import MAX_ADDRESSES, MAX_HOLDERS

KINDS = list(messages.WorkerMessage.__args__)
SHARED = {messages.Refusal, messages.ProbeRequest, messages.ProbeReply}
"""Kinds that other conversations have, too."""

labels = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=256)
nonces = st.binary(min_size=32, max_size=32)
peers = st.from_regex(r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")
addresses = st.lists(st.from_regex(r"\A/[!-~]{0,127}\Z"), max_size=MAX_ADDRESSES).map(tuple)
sizes = st.integers(0, 2**60)
rates = st.floats(1, 1e18)
blocks = st.integers(0, MAX_BLOCKS_PER_REQUEST)
parts = st.one_of(st.integers(0, 9999).map(str), st.sampled_from(["files", "client"]))
holders = st.builds(messages.WeightHolder, peer_id=peers, addresses=addresses)


@st.composite
def assignments(draw: st.DrawFn) -> messages.Assign:
    total = draw(st.integers(1, MAX_BLOCKS_PER_REQUEST))
    start = draw(st.integers(0, total - 1))
    return messages.Assign(
        number=draw(st.integers(0, 2**31 - 1)),
        model=draw(labels),
        revision=draw(labels),
        blocks=total,
        start=start,
        end=draw(st.integers(start + 1, total)),
        digests=draw(st.dictionaries(parts, nonces, max_size=4)),
        total_bytes=draw(sizes),
        dtype=draw(st.sampled_from(["auto", "float32", "bfloat16", "float16"])),
        quant=draw(st.sampled_from(["none", "int8", "nf4"])),
        cache_tokens=draw(st.integers(1, 2**40)),
        threads=draw(st.none() | st.integers(1, 4096)),
        initial_peers=draw(addresses.filter(bool)),
        holders=tuple(draw(st.lists(holders, max_size=3))),
    )


reports = st.builds(
    messages.DeviceReport,
    name=labels,
    device=labels,
    memory=sizes,
    disk=sizes,
    read_rates=st.fixed_dictionaries({"float32": rates, "bfloat16": rates, "float16": rates}),
    block_seconds=st.floats(0, 3600),
    holding=st.none() | st.builds(messages.Holding, model=labels, revision=labels, start=blocks, end=blocks),
)
MESSAGES: dict[type, st.SearchStrategy[messages.WorkerMessage]] = {
    messages.WorkerChallenge: st.builds(messages.WorkerChallenge, nonce=nonces, needs_secret=st.booleans()),
    messages.PairRequest: st.builds(messages.PairRequest, nonce=nonces, proof=st.binary(max_size=32), name=labels),
    messages.Paired: st.just(messages.Paired()),
    messages.StillHere: st.just(messages.StillHere()),
    messages.DescribeDevice: st.just(messages.DescribeDevice()),
    messages.DeviceReport: reports,
    messages.ProbeRequest: st.builds(messages.ProbeRequest, reply_bytes=st.integers(0, 1 << 20)),
    messages.ProbeReply: st.just(messages.ProbeReply()),
    messages.Assign: assignments(),
    messages.WorkerEvent: st.builds(
        messages.WorkerEvent,
        state=st.sampled_from(["idle", "receiving", "starting", "online", "failed"]),
        number=st.integers(0, 2**31 - 1),
        message=st.text(max_size=2000),
        done=sizes,
        total=sizes,
        server_id=st.none() | peers,
    ),
    messages.Release: st.builds(messages.Release, unpair=st.booleans()),
    messages.Released: st.just(messages.Released()),
    messages.Refusal: st.builds(messages.Refusal, code=st.text(max_size=256), message=st.text(max_size=2000)),
}
any_message = st.one_of(*MESSAGES.values())
own_message = st.one_of(*(strategy for kind, strategy in MESSAGES.items() if kind not in SHARED))


def test_no_kind_of_message_is_left_out_here():
    assert list(MESSAGES) == KINDS


def test_the_protocol_is_none_of_the_others():
    known = {
        messages.PROTOCOL_ID,
        messages.MEMBERS_PROTOCOL_ID,
        messages.DIAL_BACK_PROTOCOL_ID,
        messages.WEIGHTS_PROTOCOL_ID,
        messages.WORKER_PROTOCOL_ID,
    }
    assert len(known) == 5


@given(any_message)
def test_what_one_side_sends_arrives_as_it_was(message):
    decoded = messages.decode_worker(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(own_message)
def test_it_is_understood_in_no_other_conversation(message):
    others = messages.decode_client, messages.decode_server, messages.decode_handshake, messages.decode_reachability
    for decode in (*others, messages.decode_weights):
        with pytest.raises(ProtocolViolation):
            decode(messages.encode(message))


@pytest.mark.parametrize("message", [messages.InfoRequest(), messages.CloseSession(), messages.LookAgain()])
def test_no_other_message_is_understood_here(message):
    with pytest.raises(ProtocolViolation, match="not a message between a starter and its worker"):
        messages.decode_worker(messages.encode(message))


@given(st.binary(max_size=100))
def test_garbage_raises_nothing_else(data):
    with contextlib.suppress(ProtocolViolation):
        assert type(messages.decode_worker(data)) in KINDS


@given(own_message, st.data())
def test_a_changed_field_gives_a_message_or_the_same_error(message, data):
    fields = msgspec.msgpack.decode(messages.encode(message))
    index = data.draw(st.integers(0, len(fields) - 1))
    fields[index] = data.draw(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers())))
    with contextlib.suppress(ProtocolViolation, OverflowError):
        assert type(messages.decode_worker(msgspec.msgpack.encode(fields))) in KINDS


ASSIGN = messages.Assign(
    1, "m", "r", 12, 2, 7, {"files": bytes(32)}, 1, "auto", "none", 1, None, ("/ip4/1.2.3.4/tcp/1/p2p/Qm",), ()
)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 7, "end": 7},
        {"start": 8, "end": 7},
        {"end": 13},
        {"blocks": MAX_BLOCKS_PER_REQUEST + 1},
        {"model": "a\x1b[2Jb"},
        {"digests": {"../x": bytes(32)}},
        {"digests": {"1": bytes(31)}},
        {"digests": {str(block): bytes(32) for block in range(MAX_BLOCKS_PER_REQUEST + 3)}},
        {"initial_peers": ()},
        {"initial_peers": ("no address",)},
        {"initial_peers": ("/a",) * (MAX_ADDRESSES + 1)},
        {"holders": (messages.WeightHolder("Qm", ()),) * (MAX_HOLDERS + 1)},
        {"dtype": "float64"},
        {"cache_tokens": 0},
    ],
)
def test_an_assignment_that_cannot_be_is_refused(changes):
    with contextlib.suppress(ValueError):  # some cannot even be made
        data = messages.encode(msgspec.structs.replace(ASSIGN, **changes))
        with pytest.raises(ProtocolViolation):
            messages.decode_worker(data)


def test_the_largest_assignment_fits_into_a_header():
    address = "/" + "a" * 127
    holder = messages.WeightHolder("1" * 128, (address,) * MAX_ADDRESSES)
    largest = msgspec.structs.replace(
        ASSIGN,
        model="m" * 256,
        revision="r" * 256,
        digests={str(block): bytes(32) for block in range(MAX_BLOCKS_PER_REQUEST)} | {"files": bytes(32)},
        initial_peers=(address,) * MAX_ADDRESSES,
        holders=(holder,) * MAX_HOLDERS,
    )
    assert len(messages.encode(largest)) < MAX_HEADER_BYTES
    assert messages.decode_worker(messages.encode(largest)) == largest
