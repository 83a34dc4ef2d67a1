"""Messages by which peers get weights from each other."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation, WeightsNotShared
from swarm.protocol import messages
from swarm.protocol.messages.peers import MAX_PARTS
from swarm.shared_weights.manifest import all_parts

KINDS = list(messages.WeightsMessage.__args__)
DIGEST = bytes(32)
FOUND = ["PartsFound", "main", 3, {"files": DIGEST, "client": DIGEST, "0": DIGEST}]
CHUNK = ["GetChunk", "0", 1, 2]

names = st.text(max_size=256)
counts = st.integers(0, 2**31 - 1)
parts = st.sampled_from(all_parts(2048))
MESSAGES: dict[type, st.SearchStrategy[messages.WeightsMessage]] = {
    messages.FindParts: st.builds(messages.FindParts, names, names),
    messages.PartsFound: st.builds(
        messages.PartsFound,
        names,
        st.integers(1, MAX_PARTS - 2),
        st.dictionaries(parts, st.binary(min_size=32, max_size=32), max_size=5),
    ),
    messages.GetManifest: st.builds(messages.GetManifest, parts),
    messages.GetChunkDigests: st.builds(messages.GetChunkDigests, parts, counts),
    messages.GetChunk: st.builds(messages.GetChunk, parts, counts, counts),
    messages.PartData: st.just(messages.PartData()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000)),
}
any_message = st.one_of(*MESSAGES.values())


def decoded_or_refused(data: bytes) -> None:
    """Nothing but a message or a `ProtocolViolation` comes out, whatever goes in."""
    with contextlib.suppress(ProtocolViolation):
        assert type(messages.decode_weights(data)) in KINDS


def changed(message: list[object], place: int, value: object) -> bytes:
    return msgspec.msgpack.encode([*message[:place], value, *message[place + 1 :]])


def test_no_kind_of_message_is_left_out_here():
    assert set(MESSAGES) == set(KINDS)


@given(any_message)
def test_what_a_peer_sends_arrives_as_it_was(message):
    decoded = messages.decode_weights(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(st.one_of(*(strategy for kind, strategy in MESSAGES.items() if kind is not messages.Refusal)))
def test_it_is_understood_in_no_other_conversation(message):
    for decode in (messages.decode_client, messages.decode_server, messages.decode_reachability):
        with pytest.raises(ProtocolViolation):
            decode(messages.encode(message))


@given(st.binary(max_size=100))
def test_garbage_never_raises_anything_else(data):
    decoded_or_refused(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.sampled_from([kind.__name__ for kind in KINDS]), st.lists(values, max_size=4))
def test_a_known_tag_with_any_fields_never_raises_anything_else(tag, fields):
    decoded_or_refused(msgspec.msgpack.encode([tag, *fields]))


@given(any_message, st.data())
def test_a_damaged_message_never_raises_anything_else(message, data):
    encoded = bytearray(messages.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(encoded))
    decoded_or_refused(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def test_the_samples_are_right_before_they_are_spoiled():
    assert messages.decode_weights(changed(FOUND, 2, 3)) == messages.PartsFound(*FOUND[1:])
    assert messages.decode_weights(changed(CHUNK, 2, 1)) == messages.GetChunk(*CHUNK[1:])


@pytest.mark.parametrize("part", ["", "00", "01", "-1", "10000", "file", "files\n", "../files", "0/1", "١", b"0", 0])
def test_what_is_no_part(part):
    for data in (changed(CHUNK, 1, part), changed(FOUND, 3, {part: DIGEST})):
        with pytest.raises(ProtocolViolation):
            messages.decode_weights(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(changed(CHUNK, 2, -1), id="negative item"),
        pytest.param(changed(CHUNK, 2, 2**31), id="item beyond any"),
        pytest.param(changed(CHUNK, 3, 0.5), id="half a chunk"),
        pytest.param(changed(CHUNK, 3, True), id="chunk is a truth value"),
        pytest.param(msgspec.msgpack.encode([*CHUNK, 1]), id="chunk with more"),
        pytest.param(msgspec.msgpack.encode(CHUNK[:-1]), id="no chunk"),
        pytest.param(changed(FOUND, 1, "r" * 257), id="revision too long"),
        pytest.param(changed(FOUND, 2, 0), id="no blocks"),
        pytest.param(changed(FOUND, 2, MAX_PARTS - 1), id="too many blocks"),
        pytest.param(changed(FOUND, 3, {"0": bytes(31)}), id="short digest"),
        pytest.param(changed(FOUND, 3, {"0": bytes(33)}), id="long digest"),
        pytest.param(changed(FOUND, 3, {"0": "0" * 32}), id="digest as text"),
        pytest.param(changed(FOUND, 3, {str(n): DIGEST for n in range(MAX_PARTS + 1)}), id="too many parts"),
        pytest.param(changed(FOUND, 3, []), id="digests in a list"),
        pytest.param(msgspec.msgpack.encode(["FindParts", "m" * 257, ""]), id="model too long"),
        pytest.param(msgspec.msgpack.encode(["FindParts", "m", None]), id="no revision"),
        pytest.param(msgspec.msgpack.encode(["PartData", b"x"]), id="data in the header"),
        pytest.param(b"\x91" * 100_000, id="deep arrays"),
        pytest.param(b"\x94\xaaPartsFound\xa0\x01\xdf\xff\xff\xff\xff", id="four thousand million parts announced"),
    ],
)
def test_fields_outside_of_the_schema(data):
    with pytest.raises(ProtocolViolation):
        messages.decode_weights(data)


def test_a_refusal_can_be_read():
    refusal = messages.refusal(WeightsNotShared("not here"))
    assert messages.decode_weights(messages.encode(refusal)) == refusal
