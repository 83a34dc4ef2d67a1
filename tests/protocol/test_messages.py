"""Headers of all conversations: what is sent arrives, and nothing else is understood."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.errors import ProtocolViolation, WrongShape
from swarm.models.adapters.adapter_config import MAX_LORA_RANK, MAX_PROMPT_LENGTH
from swarm.protocol import messages
from swarm.protocol.framing import MAX_HEADER_BYTES
from swarm.protocol.messages import MAX_BLOCKS_PER_REQUEST, MAX_EXITS, MAX_SEQUENCES
from swarm.protocol.messages.peers import MAX_ADDRESSES, MAX_HOLDERS, MAX_PARTS, MAX_PORTS
from swarm.shared_weights.manifest import all_parts

counts = st.integers(0, 2**31 - 1)
sequences = st.lists(counts, min_size=1, max_size=20)
names = st.text(max_size=256)
formats = st.sampled_from(WireFormat)
milliseconds = st.floats(0, 1e9)
session_ids = st.binary(min_size=16, max_size=16)
checksums = st.binary(min_size=32, max_size=32)
exit_terms = st.builds(
    messages.ExitTerms,
    confidence=st.sampled_from(["softmax", "similarity", "classifier"]),
    thresholds=st.dictionaries(counts, st.floats(0, 1), min_size=1, max_size=5).map(
        lambda thresholds: tuple(sorted(thresholds.items()))
    ),
    batch=st.sampled_from(["row", "all"]),
)
steps = st.builds(
    messages.StepRequest,
    step=st.integers(0, 2**31 - 2),
    starts=sequences,
    counts=sequences,
    format=formats,
    dtype=names,
    sources=st.none() | sequences,
    offsets=st.none() | sequences,
    epoch=counts,
    follows=st.none() | counts,
    exits=st.none() | exit_terms,
    left=st.none() | sequences,
)
digests = st.none() | st.lists(st.binary(max_size=16), min_size=1, max_size=5)
blocks = st.builds(
    messages.BlockAdapterSpec,
    digest=st.binary(min_size=16, max_size=16),
    prompt_length=st.integers(0, MAX_PROMPT_LENGTH),
    modules=st.lists(
        st.builds(
            messages.LoraShape,
            module=names,
            rank=st.integers(1, MAX_LORA_RANK),
            inputs=st.integers(1, 2**20),
            outputs=st.integers(1, 2**20),
        ),
        max_size=3,
    ),
)
signed = st.builds(
    messages.Signed,
    statement=st.binary(max_size=messages.MAX_STATEMENT_BYTES),
    public_key=st.binary(max_size=messages.MAX_SIGNATURE_BYTES),
    signature=st.binary(max_size=messages.MAX_SIGNATURE_BYTES),
)
CLIENT_MESSAGES: dict[type, st.SearchStrategy[messages.ClientMessage]] = {
    messages.OpenSession: st.builds(
        messages.OpenSession,
        session_id=session_ids,
        revision=names,
        start=counts,
        end=counts,
        max_length=st.integers(1, 2**24),
        reply_format=formats,
        adapters=digests,
        early_exits=st.booleans(),
        prefix=st.none() | st.builds(messages.PrefixOf, session_ids, st.integers(0, 2**31 - 2)),
        points=st.none()
        | st.builds(messages.Points, signed, st.lists(signed, max_size=messages.MAX_SHOWN_TABS).map(tuple)),
    ),
    messages.SetNeighbors: st.builds(
        messages.SetNeighbors,
        previous_peer=st.none() | names,
        next_peer=st.none() | names,
        next_session_id=st.none() | session_ids,
        sequences=st.integers(1, MAX_SEQUENCES),
    ),
    messages.StepRequest: steps,
    messages.PushRequest: st.builds(messages.PushRequest, client=names, session_id=session_ids, step=steps),
    messages.GiveUp: st.builds(messages.GiveUp, first=counts, end=counts),
    messages.ReplayRequest: st.builds(
        messages.ReplayRequest,
        epoch=counts,
        next_step=counts,
        starts=sequences,
        counts=sequences,
        format=formats,
        dtype=names,
        offsets=st.none() | sequences,
        return_outputs=st.booleans(),
    ),
    messages.ReceiptRequest: st.builds(messages.ReceiptRequest, step=st.integers(0, 2**31 - 2)),
    messages.SignedTab: st.builds(messages.SignedTab, tab=signed),
    messages.CloseSession: st.builds(messages.CloseSession, keep=counts),
    messages.ForwardRequest: st.builds(
        messages.ForwardRequest,
        revision=names,
        start=counts,
        end=counts,
        counts=sequences,
        format=formats,
        dtype=names,
        reply_format=formats,
        offsets=st.none() | sequences,
        adapters=digests,
    ),
    messages.BackwardRequest: st.builds(
        messages.BackwardRequest,
        revision=names,
        start=counts,
        end=counts,
        counts=sequences,
        format=formats,
        dtype=names,
        reply_format=formats,
        offsets=st.none() | sequences,
        adapters=digests,
    ),
    messages.PutAdapters: st.builds(
        messages.PutAdapters, start=counts, blocks=st.lists(st.none() | blocks, min_size=1, max_size=5), dtype=names
    ),
    messages.InfoRequest: st.just(messages.InfoRequest()),
    messages.ProbeRequest: st.builds(messages.ProbeRequest, reply_bytes=st.integers(0, messages.MAX_PROBE_BYTES)),
}
SERVER_MESSAGES: dict[type, st.SearchStrategy[messages.ServerMessage]] = {
    messages.SessionOpened: st.builds(messages.SessionOpened, next_step=counts, begun=counts),
    messages.StepReply: st.builds(
        messages.StepReply,
        step=counts,
        format=formats,
        dtype=names,
        compute_ms=milliseconds,
        input_checksum=checksums,
        pushed=st.booleans(),
        left=st.none() | sequences,
        sessions=counts,
    ),
    messages.ReplayReply: st.builds(
        messages.ReplayReply, format=formats, dtype=names, compute_ms=milliseconds, input_checksum=checksums
    ),
    messages.Receipt: st.builds(
        messages.Receipt,
        statement=st.binary(max_size=messages.MAX_STATEMENT_BYTES),
        public_key=st.binary(max_size=messages.MAX_SIGNATURE_BYTES),
        signature=st.binary(max_size=messages.MAX_SIGNATURE_BYTES),
    ),
    messages.TabKept: st.builds(messages.TabKept, tab=st.none() | signed),
    messages.ForwardReply: st.builds(messages.ForwardReply, format=formats, dtype=names, compute_ms=milliseconds),
    messages.BackwardReply: st.builds(messages.BackwardReply, format=formats, dtype=names, compute_ms=milliseconds),
    messages.AdaptersStored: st.builds(messages.AdaptersStored, lifetime_s=st.floats(0, 1e9)),
    messages.InfoReply: st.builds(
        messages.InfoReply, start=counts, end=counts, cache_tokens_free=counts, sessions=counts, version=names
    ),
    messages.ProbeReply: st.just(messages.ProbeReply()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000), step=st.none() | counts),
}

labels = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=256)
nonces = st.binary(min_size=32, max_size=32)
peers = st.from_regex(r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")
address = st.from_regex(r"\A/[!-~]{0,127}\Z")
addresses = st.lists(address, max_size=MAX_ADDRESSES).map(tuple)
sizes = st.integers(0, 2**60)
rates = st.floats(1, 1e18)
block_numbers = st.integers(0, MAX_BLOCKS_PER_REQUEST)
parts = st.sampled_from(all_parts(2048))
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
    holding=st.none()
    | st.builds(messages.Holding, model=labels, revision=labels, start=block_numbers, end=block_numbers),
)
WORKER_MESSAGES: dict[type, st.SearchStrategy[messages.WorkerMessage]] = {
    messages.WorkerChallenge: st.builds(messages.WorkerChallenge, nonce=nonces),
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
ports = st.lists(st.integers(1, 65535), max_size=MAX_PORTS)
REACHABILITY_MESSAGES: dict[type, st.SearchStrategy[messages.ReachabilityMessage]] = {
    messages.DialBackRequest: st.builds(messages.DialBackRequest, ports=ports),
    messages.DialBackReply: st.builds(messages.DialBackReply, host=st.text(max_size=45), reached=ports),
    messages.UnreachableNotice: st.builds(
        messages.UnreachableNotice, peer_id=st.from_regex(r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")
    ),
    messages.LookAgain: st.just(messages.LookAgain()),
    messages.ForgetConnections: st.just(messages.ForgetConnections()),
    messages.PunchRequest: st.builds(messages.PunchRequest, peer_id=peers, reverse=st.booleans()),
    messages.PunchReply: st.builds(messages.PunchReply, address=address),
    messages.Punch: st.builds(messages.Punch, peer_id=peers, address=address, dial=st.booleans()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000)),
}
WEIGHTS_MESSAGES: dict[type, st.SearchStrategy[messages.WeightsMessage]] = {
    messages.FindParts: st.builds(messages.FindParts, names, names),
    messages.PartsFound: st.builds(
        messages.PartsFound,
        names,
        st.integers(1, MAX_PARTS - 2),
        st.dictionaries(parts, st.binary(min_size=32, max_size=32), max_size=5),
    ),
    messages.GetManifest: st.builds(messages.GetManifest, parts),
    messages.GetChunkDigests: st.builds(messages.GetChunkDigests, parts),
    messages.GetChunk: st.builds(messages.GetChunk, parts, counts, counts),
    messages.PartData: st.just(messages.PartData()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000)),
}
HANDSHAKE_MESSAGES: dict[type, st.SearchStrategy[messages.HandshakeMessage]] = {
    messages.MemberChallenge: st.builds(messages.MemberChallenge, nonce=nonces),
    messages.MemberProof: st.builds(
        messages.MemberProof,
        certificate=st.binary(max_size=512),
        nonce=nonces,
        signature=st.binary(min_size=64, max_size=64),
        revocations=counts,
    ),
    messages.NewerRevocations: st.just(messages.NewerRevocations()),
    messages.Refusal: REACHABILITY_MESSAGES[messages.Refusal],
}
CONVERSATIONS = {
    messages.decode_client: (CLIENT_MESSAGES, messages.ClientMessage),
    messages.decode_server: (SERVER_MESSAGES, messages.ServerMessage),
    messages.decode_worker: (WORKER_MESSAGES, messages.WorkerMessage),
    messages.decode_reachability: (REACHABILITY_MESSAGES, messages.ReachabilityMessage),
    messages.decode_weights: (WEIGHTS_MESSAGES, messages.WeightsMessage),
    messages.decode_handshake: (HANDSHAKE_MESSAGES, messages.HandshakeMessage),
}
spoken = st.one_of(
    *(
        st.tuples(st.just(decode), strategy)
        for decode, (known, _) in CONVERSATIONS.items()
        for strategy in known.values()
    )
)
"""A message, and the decoder of a conversation that it belongs to."""

HOST = "81.2.69.142"
DIGEST = bytes(32)
OPEN = ["OpenSession", b"0123456789abcdef", "main", 0, 3, 64, "none"]
STEP = ["StepRequest", 0, [0, 4], [2, 1], "none", "float32", None]
EXITS = ["ExitTerms", "softmax", [[4, 0.5], [8, 0.25]], "row"]
REPLY = ["StepReply", 0, "none", "float32", 1.5, bytes(32), True]
LINK = ["SetNeighbors", "before", "behind", b"0123456789abcdef"]
PUSH = ["PushRequest", "client", b"0123456789abcdef", STEP]
REPLAY = ["ReplayRequest", 7, [0, 4], [2, 0], "none", "float32", None, True]
PROBE = ["ProbeRequest", 1000]
BACKWARD = ["BackwardRequest", "main", 0, 3, [2, 1], "none", "float32", "float16"]
ADAPTER = [b"0123456789abcdef", 3, [["self_attn.q_proj", 4, 32, 32]]]
PUT = ["PutAdapters", 0, [ADAPTER, None], "float32"]
FORWARD = ["ForwardRequest", "main", 0, 3, [2, 1], "none", "float32", "none"]


def changed(message: list[object], place: int, value: object) -> bytes:
    return msgspec.msgpack.encode([*message[:place], value, *message[place + 1 :]])


def changed_terms(place: int, value: object) -> list[object]:
    return [*EXITS[:place], value, *EXITS[place + 1 :]]


def step_with_exits(exits: object, left: object = None) -> bytes:
    return msgspec.msgpack.encode([*STEP, None, 0, exits, left])


FOUND = ["PartsFound", "main", 3, {"files": DIGEST, "client": DIGEST, "0": DIGEST}]
CHUNK = ["GetChunk", "0", 1, 2]
ASSIGN = messages.Assign(
    1, "m", "r", 12, 2, 7, {"files": bytes(32)}, 1, "auto", "none", 1, None, ("/ip4/1.2.3.4/tcp/1/p2p/Qm",), ()
)


def refused_by_all(data: bytes) -> None:
    for decode in CONVERSATIONS:
        with pytest.raises(ProtocolViolation):
            decode(data)


def decoded_or_refused(data: bytes) -> None:
    """Nothing but a message or a `ProtocolViolation` comes out, whatever goes in."""
    for decode, (known, _) in CONVERSATIONS.items():
        with contextlib.suppress(ProtocolViolation):
            assert type(decode(data)) in known


def test_each_conversation_is_tested_with_all_of_its_messages():
    for known, union in CONVERSATIONS.values():
        assert set(known) == set(union.__args__)


def test_protocols_have_different_names():
    names = ("PROTOCOL_ID", "MEMBERS_PROTOCOL_ID", "DIAL_BACK_PROTOCOL_ID", "WEIGHTS_PROTOCOL_ID", "WORKER_PROTOCOL_ID")
    assert len({getattr(messages, name) for name in names}) == len(names)


@given(spoken)
def test_a_message_arrives_as_it_was_sent_and_is_understood_in_its_own_conversations_only(one):
    decode, message = one
    decoded = decode(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)
    for other, (known, _) in CONVERSATIONS.items():
        if type(message) not in known:
            with pytest.raises(ProtocolViolation):
                other(messages.encode(message))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    decoded_or_refused(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
tags = st.sampled_from(sorted({kind.__name__ for known, _ in CONVERSATIONS.values() for kind in known}))


@given(tags, st.lists(values, max_size=9))
def test_a_known_tag_with_any_fields_is_decoded_or_refused(tag, fields):
    decoded_or_refused(msgspec.msgpack.encode([tag, *fields]))


@given(spoken, st.data())
def test_a_damaged_message_is_decoded_or_refused(one, data):
    encoded = bytearray(messages.encode(one[1]))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(encoded))
    decoded_or_refused(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


NO_PARTS = ["", "00", "01", "-1", "10000", "file", "files\n", "../files", "0/1", "١", b"0", 0]
REACHABILITY_OUTSIDE_OF_THE_SCHEMA = [
    ("too many ports", ["DialBackRequest", [1] * (MAX_PORTS + 1)]),
    ("port 0", ["DialBackRequest", [0]]),
    ("negative port", ["DialBackRequest", [-1]]),
    ("port is a truth value", ["DialBackRequest", [True]]),
    ("ports as text", ["DialBackRequest", "22"]),
    ("request with a host", ["DialBackRequest", [22], HOST]),
    ("host too long", ["DialBackReply", "1" * 46, [22]]),
    ("too many ports reached", ["DialBackReply", HOST, [1] * (MAX_PORTS + 1)]),
    ("notice about too long an id", ["UnreachableNotice", "p" * 129]),
    ("notice about an id with a line break", ["UnreachableNotice", "QmRAa9\n"]),
    ("notice about what is not base58", ["UnreachableNotice", "0OIl"]),
    ("forget somebody else's connections", ["ForgetConnections", "peer"]),
    ("punch at what is no address", ["Punch", "QmRAa9", "45.0.0.9", True]),
    ("punch at too long an address", ["Punch", "QmRAa9", "/" + "a" * 128, True]),
    ("reply with an address that has a line break", ["PunchReply", "/ip4\n"]),
    ("request to punch for no peer", ["PunchRequest", "", True]),
]
NO_MESSAGES = [
    ("empty", b""),
    ("unknown tag", msgspec.msgpack.encode(["Pickle", b"x"])),
    ("tag of another type", msgspec.msgpack.encode([0, 1])),
    ("map", msgspec.msgpack.encode({"type": "InfoRequest"})),
    ("tag that is no utf-8", b"\x91\xa4\xff\xfe\xfd\xfc"),
    ("something behind the message", msgspec.msgpack.encode(["InfoRequest"]) + b"\x00"),
    ("deep arrays", b"\x91" * 100_000),
    ("deep extra field", b"\x92\xabInfoRequest" + b"\x91" * 100_000),
    ("four thousand million fields announced", b"\xdd\xff\xff\xff\xff"),
    ("byte that msgpack never uses", b"\xc1"),
]
OUTSIDE_OF_THE_SCHEMA = [
    ("session id too short", changed(OPEN, 1, b"short")),
    ("revision too long", changed(OPEN, 2, "r" * 257)),
    ("negative block", changed(OPEN, 3, -1)),
    ("block beyond any", changed(OPEN, 3, 2**31)),
    ("block is a truth value", changed(OPEN, 3, True)),
    ("no length", changed(OPEN, 5, 0)),
    ("length beyond any", changed(OPEN, 5, 2**24 + 1)),
    ("unknown format", changed(OPEN, 6, "zip")),
    ("unknown field", msgspec.msgpack.encode([*OPEN, "extra"])),
    ("missing field", msgspec.msgpack.encode(OPEN[:-1])),
    ("negative step", changed(STEP, 1, -1)),
    ("no starts", changed(STEP, 2, [])),
    ("negative count", changed(STEP, 3, [2, -1])),
    ("fractional count", changed(STEP, 3, [2, 1.5])),
    ("no counts", changed(STEP, 3, [])),
    ("too many sequences", changed(STEP, 3, [1] * (MAX_SEQUENCES + 1))),
    ("negative source", changed(STEP, 6, [-1, 0])),
    ("dtype too long", changed(STEP, 5, "d" * 257)),
    ("unknown confidence", step_with_exits(changed_terms(1, "guess"))),
    ("exits out of order", step_with_exits(changed_terms(2, [[8, 0.5], [4, 0.5]]))),
    ("exit named twice", step_with_exits(changed_terms(2, [[4, 0.5], [4, 0.5]]))),
    ("threshold above 1", step_with_exits(changed_terms(2, [[4, 1.5]]))),
    ("threshold that is no number", step_with_exits(changed_terms(2, [[4, math.nan]]))),
    ("too many exits", step_with_exits(changed_terms(2, [[n, 0.5] for n in range(MAX_EXITS + 1)]))),
    ("left in front of a negative block", step_with_exits(None, [-1, 0])),
    ("left of too many sequences", step_with_exits(None, [0] * (MAX_SEQUENCES + 1))),
    ("too many sequences", changed(FORWARD, 4, [1] * (MAX_SEQUENCES + 1))),
    ("unknown gradient format", changed(BACKWARD, 7, "zip")),
    ("no adapter for no block", msgspec.msgpack.encode([*FORWARD, None, []])),
    ("digest too long", msgspec.msgpack.encode([*FORWARD, None, [b"x" * 17]])),
    ("too many adapters", changed(PUT, 2, [None] * 1025)),
    ("digest too short", changed(PUT, 2, [[b"short", 0, []]])),
    ("prompt of negative length", changed(PUT, 2, [[ADAPTER[0], -1, []]])),
    ("rank of nothing", changed(PUT, 2, [[ADAPTER[0], 0, [["m", 0, 1, 1]]]])),
    ("no outputs", changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1, 1, 0]]]])),
    ("too many modules", changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1, 1, 1]] * 65]])),
    ("name too long", changed(LINK, 1, "p" * 257)),
    ("next session too short", changed(LINK, 3, b"short")),
    ("push for nobody", changed(PUSH, 1, None)),
    ("push into too long a session id", changed(PUSH, 2, b"x" * 17)),
    ("push of another message", changed(PUSH, 3, OPEN)),
    ("push of a push", changed(PUSH, 3, PUSH)),
    ("push too long", changed(PUSH, 3, [*STEP[:3], [1] * (MAX_SEQUENCES + 1), *STEP[4:]])),
    ("negative next step", changed(REPLAY, 1, -1)),
    ("replay without starts", changed(REPLAY, 2, [])),
    ("wanted is a number", changed(REPLAY, 7, 1)),
    ("negative bytes wanted", changed(PROBE, 1, -1)),
    ("more bytes wanted than a probe may carry", changed(PROBE, 1, messages.MAX_PROBE_BYTES + 1)),
    ("refusal of a negative step", msgspec.msgpack.encode(["Refusal", "code", "why", -1])),
    ("checksum too short", changed(REPLY, 5, b"short")),
    ("no checksum", changed(REPLY, 5, None)),
    ("a step that none can follow", changed(STEP, 1, 2**31 - 1)),
    ("link with too many rows", changed([*LINK, 1], 4, MAX_SEQUENCES + 1)),
    ("replay took negative time", changed(["ReplayReply", "none", "float32", 1.5, bytes(32)], 3, -1.0)),
    ("negative item", changed(CHUNK, 2, -1)),
    ("item beyond any", changed(CHUNK, 2, 2**31)),
    ("chunk is a truth value", changed(CHUNK, 3, True)),
    ("revision too long", changed(FOUND, 1, "r" * 257)),
    ("too many blocks", changed(FOUND, 2, MAX_PARTS - 1)),
    ("long digest", changed(FOUND, 3, {"0": bytes(33)})),
    ("digests in a list", changed(FOUND, 3, [])),
    ("model too long", msgspec.msgpack.encode(["FindParts", "m" * 257, ""])),
    ("four thousand million parts announced", b"\x94\xaaPartsFound\xa0\x01\xdf\xff\xff\xff\xff"),
    *(("not a part", changed(CHUNK, 1, part)) for part in NO_PARTS),
    *(("digest of what is not a part", changed(FOUND, 3, {part: DIGEST})) for part in NO_PARTS),
    *((why, msgspec.msgpack.encode(fields)) for why, fields in REACHABILITY_OUTSIDE_OF_THE_SCHEMA),
]


@pytest.mark.parametrize("cases", [NO_MESSAGES, OUTSIDE_OF_THE_SCHEMA], ids=["no messages", "outside of the schema"])
def test_hostile_headers_are_refused(cases):
    for why, data in cases:
        for decode in CONVERSATIONS:
            with pytest.raises(ProtocolViolation):
                pytest.fail(f"{why}: {decode(data)}")


def test_the_samples_are_right_before_they_are_spoiled():
    assert messages.decode_client(changed(OPEN, 4, 3)) == messages.OpenSession(*OPEN[1:])
    assert messages.decode_client(changed(STEP, 1, 0)) == messages.StepRequest(*STEP[1:])
    terms = messages.ExitTerms("softmax", ((4, 0.5), (8, 0.25)), "row")
    with_exits = messages.StepRequest(*STEP[1:], None, 0, terms, [0, 4])
    assert messages.decode_client(step_with_exits(EXITS, [0, 4])) == with_exits
    assert messages.decode_client(changed(FORWARD, 2, 0)) == messages.ForwardRequest(*FORWARD[1:])
    assert messages.decode_client(changed(BACKWARD, 2, 0)) == messages.BackwardRequest(*BACKWARD[1:])
    shape = messages.LoraShape("self_attn.q_proj", 4, 32, 32)
    described = messages.BlockAdapterSpec(b"0123456789abcdef", 3, [shape])
    assert messages.decode_client(changed(PUT, 1, 0)) == messages.PutAdapters(0, [described, None], "float32")
    assert messages.decode_client(changed(LINK, 1, "before")) == messages.SetNeighbors(*LINK[1:])
    pushed = messages.decode_client(changed(PUSH, 1, "client"))
    assert pushed == messages.PushRequest("client", b"0123456789abcdef", messages.StepRequest(*STEP[1:]))
    assert messages.decode_client(changed(REPLAY, 1, 7)) == messages.ReplayRequest(*REPLAY[1:])
    assert messages.decode_client(changed(PROBE, 1, 1000)) == messages.ProbeRequest(1000)
    assert messages.decode_server(changed(REPLY, 1, 0)) == messages.StepReply(*REPLY[1:])
    assert messages.decode_weights(changed(FOUND, 2, 3)) == messages.PartsFound(*FOUND[1:])
    assert messages.decode_weights(changed(CHUNK, 2, 1)) == messages.GetChunk(*CHUNK[1:])


def test_bad_utf8_inside_of_a_field():
    right = msgspec.msgpack.encode(OPEN)
    assert right.count(b"\xa4main") == 1
    refused_by_all(right.replace(b"\xa4main", b"\xa4m\xffi\xfe"))


def test_a_time_that_cannot_be():
    for number in [math.inf, math.nan, -0.1, 1e10]:
        for message in (
            messages.StepReply(0, WireFormat.NONE, "float32", number, bytes(32)),
            messages.ReplayReply(WireFormat.NONE, "float32", number, bytes(32)),
            messages.ForwardReply(WireFormat.NONE, "float32", number),
        ):
            refused_by_all(messages.encode(message))


def test_a_refusal_carries_code_and_reason():
    refusal = messages.refusal(WrongShape("too few values"))
    assert refusal == messages.Refusal("wrong_shape", "too few values")
    assert messages.refusal(WrongShape("too few values"), 7) == messages.Refusal("wrong_shape", "too few values", 7)


@given(st.text(alphabet="aé€😀", min_size=1999, max_size=2400))
def test_a_refusal_with_a_long_reason_can_be_read(reason):
    decoded = messages.decode_server(messages.encode(messages.refusal(WrongShape(reason))))
    assert decoded == messages.Refusal("wrong_shape", reason[:2000])


ASSIGNMENTS_THAT_CANNOT_BE = [
    {"start": 7, "end": 7},
    {"end": 13},
    {"model": "a\x1b[2Jb"},
    {"digests": {"../x": bytes(32)}},
    {"digests": {str(block): bytes(32) for block in range(MAX_BLOCKS_PER_REQUEST + 3)}},
    {"initial_peers": ()},
    {"initial_peers": ("/a",) * (MAX_ADDRESSES + 1)},
    {"holders": (messages.WeightHolder("Qm", ()),) * (MAX_HOLDERS + 1)},
    {"dtype": "float64"},
]


def test_an_assignment_that_cannot_be_is_refused():
    for changes in ASSIGNMENTS_THAT_CANNOT_BE:
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
