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
from swarm.protocol.messages import MAX_EXITS, MAX_SEQUENCES

CLIENT = list(messages.ClientMessage.__args__)
SERVER = list(messages.ServerMessage.__args__)

counts = st.integers(0, 2**31 - 1)
sequences = st.lists(counts, min_size=1, max_size=20)
names = st.text(max_size=256)
formats = st.sampled_from(WireFormat)
milliseconds = st.floats(0, 1e9)
session_ids = st.binary(min_size=16, max_size=16)
checksums = st.binary(min_size=16, max_size=16)
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
    messages.CloseSession: st.just(messages.CloseSession()),
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
        gradient_format=formats,
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
    messages.SessionOpened: st.builds(messages.SessionOpened, next_step=counts),
    messages.StepReply: st.builds(
        messages.StepReply,
        step=counts,
        format=formats,
        dtype=names,
        compute_ms=milliseconds,
        input_checksum=checksums,
        pushed=st.booleans(),
        left=st.none() | sequences,
    ),
    messages.ReplayReply: st.builds(
        messages.ReplayReply, format=formats, dtype=names, compute_ms=milliseconds, input_checksum=checksums
    ),
    messages.ForwardReply: st.builds(messages.ForwardReply, format=formats, dtype=names, compute_ms=milliseconds),
    messages.BackwardReply: st.builds(messages.BackwardReply, format=formats, dtype=names, compute_ms=milliseconds),
    messages.AdaptersStored: st.builds(messages.AdaptersStored, lifetime_s=st.floats(0, 1e9)),
    messages.InfoReply: st.builds(
        messages.InfoReply, start=counts, end=counts, cache_tokens_free=counts, sessions=counts, version=names
    ),
    messages.ProbeReply: st.just(messages.ProbeReply()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000), step=st.none() | counts),
}
client_messages = st.one_of(*CLIENT_MESSAGES.values())
server_messages = st.one_of(*SERVER_MESSAGES.values())

OPEN = ["OpenSession", b"0123456789abcdef", "main", 0, 3, 64, "none"]
STEP = ["StepRequest", 0, [0, 4], [2, 1], "none", "float32", None]
EXITS = ["ExitTerms", "softmax", [[4, 0.5], [8, 0.25]], "row"]
REPLY = ["StepReply", 0, "none", "float32", 1.5, b"0123456789abcdef", True]
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


def refused_by_all(data: bytes) -> None:
    for decode in (messages.decode_client, messages.decode_server):
        with pytest.raises(ProtocolViolation):
            decode(data)


def test_no_kind_of_message_is_left_out_here():
    assert list(CLIENT_MESSAGES) == CLIENT
    assert list(SERVER_MESSAGES) == SERVER


@given(client_messages)
def test_what_a_client_sends_arrives_as_it_was(message):
    decoded = messages.decode_client(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(server_messages)
def test_what_a_server_sends_arrives_as_it_was(message):
    decoded = messages.decode_server(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


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


@given(client_messages)
def test_a_request_is_no_reply(message):
    with pytest.raises(ProtocolViolation):
        messages.decode_server(messages.encode(message))


@given(server_messages)
def test_a_reply_is_no_request(message):
    with pytest.raises(ProtocolViolation):
        messages.decode_client(messages.encode(message))


def decoded_or_refused(data: bytes) -> None:
    """Nothing but a message or a `ProtocolViolation` comes out, whatever goes in."""
    for decode, kinds in ((messages.decode_client, CLIENT), (messages.decode_server, SERVER)):
        with contextlib.suppress(ProtocolViolation):
            assert type(decode(data)) in kinds


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data):
    decoded_or_refused(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
tags = st.sampled_from([kind.__name__ for kind in CLIENT + SERVER])


@given(tags, st.lists(values, max_size=9))
def test_a_known_tag_with_any_fields_never_raises_anything_else(tag, fields):
    decoded_or_refused(msgspec.msgpack.encode([tag, *fields]))


@given(st.one_of(client_messages, server_messages), st.data())
def test_a_damaged_message_never_raises_anything_else(message, data):
    encoded = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(encoded))
    decoded_or_refused(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(msgspec.msgpack.encode(["Pickle", b"x"]), id="unknown tag"),
        pytest.param(msgspec.msgpack.encode([0, 1]), id="tag of another type"),
        pytest.param(msgspec.msgpack.encode([]), id="no tag"),
        pytest.param(msgspec.msgpack.encode({"type": "InfoRequest"}), id="map"),
        pytest.param(msgspec.msgpack.encode("InfoRequest"), id="bare string"),
        pytest.param(b"\x91\xa4\xff\xfe\xfd\xfc", id="tag that is no utf-8"),
        pytest.param(msgspec.msgpack.encode(["InfoRequest"]) + b"\x00", id="something behind the message"),
        pytest.param(b"\x91" * 100_000, id="deep arrays"),
        pytest.param(b"\x81" * 100_000, id="deep maps"),
        pytest.param(b"\x92\xabInfoRequest" + b"\x91" * 100_000, id="deep extra field"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="four thousand million fields announced"),
        pytest.param(b"\x92\xa7Refusal\xdb\xff\xff\xff\xff", id="four gigabytes of text announced"),
        pytest.param(b"\xc1", id="byte that msgpack never uses"),
        pytest.param(b"\xc7\x01\x05\x00", id="extension type"),
    ],
)
def test_no_message_at_all(data):
    refused_by_all(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(changed(OPEN, 1, b"short"), id="session id too short"),
        pytest.param(changed(OPEN, 1, b"x" * 17), id="session id too long"),
        pytest.param(changed(OPEN, 1, "0123456789abcdef"), id="session id as text"),
        pytest.param(changed(OPEN, 2, "r" * 257), id="revision too long"),
        pytest.param(changed(OPEN, 2, None), id="revision missing"),
        pytest.param(changed(OPEN, 3, -1), id="negative block"),
        pytest.param(changed(OPEN, 3, 2**31), id="block beyond any"),
        pytest.param(changed(OPEN, 3, 0.5), id="half a block"),
        pytest.param(changed(OPEN, 3, True), id="block is a truth value"),
        pytest.param(changed(OPEN, 3, "0"), id="block as text"),
        pytest.param(changed(OPEN, 5, 0), id="no length"),
        pytest.param(changed(OPEN, 5, 2**24 + 1), id="length beyond any"),
        pytest.param(changed(OPEN, 6, "zip"), id="unknown format"),
        pytest.param(changed(OPEN, 6, 0), id="format as number"),
        pytest.param(msgspec.msgpack.encode([*OPEN, "extra"]), id="unknown field"),
        pytest.param(msgspec.msgpack.encode(OPEN[:-1]), id="missing field"),
        pytest.param(changed(STEP, 1, -1), id="negative step"),
        pytest.param(changed(STEP, 2, [0, -4]), id="negative start"),
        pytest.param(changed(STEP, 2, []), id="no starts"),
        pytest.param(changed(STEP, 2, 0), id="starts is a number"),
        pytest.param(changed(STEP, 3, [2, -1]), id="negative count"),
        pytest.param(changed(STEP, 3, [2, 2**31]), id="count beyond any"),
        pytest.param(changed(STEP, 3, [2, 1.5]), id="fractional count"),
        pytest.param(changed(STEP, 3, [2, None]), id="count is null"),
        pytest.param(changed(STEP, 3, []), id="no counts"),
        pytest.param(changed(STEP, 3, [1] * (MAX_SEQUENCES + 1)), id="too many sequences"),
        pytest.param(changed(STEP, 6, [0] * (MAX_SEQUENCES + 1)), id="too many sources"),
        pytest.param(changed(STEP, 6, [-1, 0]), id="negative source"),
        pytest.param(changed(STEP, 6, []), id="no sources"),
        pytest.param(changed(STEP, 5, "d" * 257), id="dtype too long"),
        pytest.param(changed(STEP, 5, b"float32"), id="dtype as bytes"),
        pytest.param(step_with_exits(changed_terms(1, "guess")), id="unknown confidence"),
        pytest.param(step_with_exits(changed_terms(2, [])), id="exits nowhere"),
        pytest.param(step_with_exits(changed_terms(2, [[8, 0.5], [4, 0.5]])), id="exits out of order"),
        pytest.param(step_with_exits(changed_terms(2, [[4, 0.5], [4, 0.5]])), id="exit named twice"),
        pytest.param(step_with_exits(changed_terms(2, [[-4, 0.5]])), id="exit in front of a negative block"),
        pytest.param(step_with_exits(changed_terms(2, [[4, 1.5]])), id="threshold above 1"),
        pytest.param(step_with_exits(changed_terms(2, [[4, -0.5]])), id="negative threshold"),
        pytest.param(step_with_exits(changed_terms(2, [[4, math.nan]])), id="threshold that is no number"),
        pytest.param(step_with_exits(changed_terms(2, [[4]])), id="exit without a threshold"),
        pytest.param(step_with_exits(changed_terms(2, [[n, 0.5] for n in range(MAX_EXITS + 1)])), id="too many exits"),
        pytest.param(step_with_exits(changed_terms(3, "some")), id="unknown rule for batches"),
        pytest.param(step_with_exits(EXITS[1:]), id="exits without a tag"),
        pytest.param(step_with_exits(None, [-1, 0]), id="left in front of a negative block"),
        pytest.param(step_with_exits(None, []), id="left of no sequences"),
        pytest.param(step_with_exits(None, [0] * (MAX_SEQUENCES + 1)), id="left of too many sequences"),
        pytest.param(changed(FORWARD, 4, [1] * (MAX_SEQUENCES + 1)), id="too many sequences"),
        pytest.param(changed(FORWARD, 4, [[1]]), id="nested counts"),
        pytest.param(changed(BACKWARD, 7, "zip"), id="unknown gradient format"),
        pytest.param(changed(BACKWARD, 4, [1] * (MAX_SEQUENCES + 1)), id="backward of too many sequences"),
        pytest.param(msgspec.msgpack.encode([*FORWARD, None, []]), id="no adapter for no block"),
        pytest.param(msgspec.msgpack.encode([*FORWARD, None, [b"x" * 17]]), id="digest too long"),
        pytest.param(msgspec.msgpack.encode([*BACKWARD, None, ["text"]]), id="digest as text"),
        pytest.param(msgspec.msgpack.encode([*BACKWARD, None, [b""] * 1025]), id="adapters of too many blocks"),
        pytest.param(changed(PUT, 2, []), id="no adapters"),
        pytest.param(changed(PUT, 2, [None] * 1025), id="too many adapters"),
        pytest.param(changed(PUT, 2, [[b"short", 0, []]]), id="digest too short"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], -1, []]]), id="prompt of negative length"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], MAX_PROMPT_LENGTH + 1, []]]), id="prompt too long"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m", 0, 1, 1]]]]), id="rank of nothing"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1025, 1, 1]]]]), id="rank beyond any"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1, 2**20 + 1, 1]]]]), id="inputs beyond any"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1, 1, 0]]]]), id="no outputs"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m" * 257, 1, 1, 1]]]]), id="module's name too long"),
        pytest.param(changed(PUT, 2, [[ADAPTER[0], 0, [["m", 1, 1, 1]] * 65]]), id="too many modules"),
        pytest.param(changed(STEP, 1, 2**31), id="step beyond any"),
        pytest.param(changed(LINK, 1, "p" * 257), id="name too long"),
        pytest.param(changed(LINK, 2, b"behind"), id="name as bytes"),
        pytest.param(changed(LINK, 3, b"short"), id="next session too short"),
        pytest.param(changed(LINK, 3, ""), id="next session as text"),
        pytest.param(msgspec.msgpack.encode(LINK[:-1]), id="link without a session"),
        pytest.param(changed(PUSH, 1, None), id="push for nobody"),
        pytest.param(changed(PUSH, 1, "c" * 257), id="client's name too long"),
        pytest.param(changed(PUSH, 2, b"x" * 17), id="push into too long a session id"),
        pytest.param(changed(PUSH, 3, None), id="push of nothing"),
        pytest.param(changed(PUSH, 3, OPEN), id="push of another message"),
        pytest.param(changed(PUSH, 3, PUSH), id="push of a push"),
        pytest.param(changed(PUSH, 3, [*STEP[:3], [-1], *STEP[4:]]), id="push of a wrong step"),
        pytest.param(changed(PUSH, 3, [*STEP[:3], [1] * (MAX_SEQUENCES + 1), *STEP[4:]]), id="push too long"),
        pytest.param(changed(REPLAY, 1, -1), id="negative next step"),
        pytest.param(changed(REPLAY, 1, 2**31), id="next step beyond any"),
        pytest.param(changed(REPLAY, 2, []), id="replay without starts"),
        pytest.param(changed(REPLAY, 3, [1] * (MAX_SEQUENCES + 1)), id="replay of too many sequences"),
        pytest.param(changed(REPLAY, 6, []), id="replay with no offsets"),
        pytest.param(changed(REPLAY, 7, 1), id="wanted is a number"),
        pytest.param(msgspec.msgpack.encode(REPLAY[:-1]), id="replay that wants neither"),
        pytest.param(changed(PROBE, 1, -1), id="negative bytes wanted"),
        pytest.param(changed(PROBE, 1, messages.MAX_PROBE_BYTES + 1), id="more bytes wanted than a probe may carry"),
        pytest.param(changed(REPLY, 6, 1), id="pushed is a number"),
        pytest.param(msgspec.msgpack.encode(["Refusal", "code", "why", -1]), id="refusal of a negative step"),
        pytest.param(msgspec.msgpack.encode(["ProbeReply", 0]), id="probe reply with a field"),
        pytest.param(changed(REPLY, 5, b"short"), id="checksum too short"),
        pytest.param(changed(REPLY, 5, None), id="no checksum"),
        pytest.param(msgspec.msgpack.encode(REPLY[:5]), id="reply without a checksum"),
        pytest.param(changed(STEP, 1, 2**31 - 1), id="a step that none can follow"),
        pytest.param(changed([*LINK, 1], 4, 0), id="link without rows"),
        pytest.param(changed([*LINK, 1], 4, MAX_SEQUENCES + 1), id="link with too many rows"),
        pytest.param(
            changed(["ReplayReply", "none", "float32", 1.5, bytes(16)], 3, -1.0), id="replay took negative time"
        ),
        pytest.param(msgspec.msgpack.encode(["InfoRequest", 1]), id="info with a field"),
        pytest.param(msgspec.msgpack.encode(["CloseSession", None]), id="close with a field"),
    ],
)
def test_fields_outside_of_the_schema(data):
    refused_by_all(data)


def test_bad_utf8_inside_of_a_field():
    right = msgspec.msgpack.encode(OPEN)
    assert right.count(b"\xa4main") == 1
    refused_by_all(right.replace(b"\xa4main", b"\xa4m\xffi\xfe"))


def test_as_many_sequences_as_are_allowed():
    message = messages.StepRequest(
        0, [0] * MAX_SEQUENCES, [1] * MAX_SEQUENCES, WireFormat.NONE, "float32", [0] * MAX_SEQUENCES
    )
    assert messages.decode_client(messages.encode(message)) == message


@pytest.mark.parametrize("number", [math.inf, math.nan, -0.1, 1e10])
def test_a_time_that_cannot_be(number):
    for message in (
        messages.StepReply(0, WireFormat.NONE, "float32", number, bytes(16)),
        messages.ReplayReply(WireFormat.NONE, "float32", number, bytes(16)),
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
