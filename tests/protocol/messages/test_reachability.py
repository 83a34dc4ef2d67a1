"""Messages by which peers find out whether they can be reached."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation, RequestRefused
from swarm.protocol import messages
from swarm.protocol.messages.peers import MAX_PORTS

KINDS = list(messages.ReachabilityMessage.__args__)
HOST = "81.2.69.142"

names = st.text(max_size=256)
ports = st.lists(st.integers(1, 65535), max_size=MAX_PORTS)
MESSAGES: dict[type, st.SearchStrategy[messages.ReachabilityMessage]] = {
    messages.DialBackRequest: st.builds(messages.DialBackRequest, ports=ports),
    messages.DialBackReply: st.builds(messages.DialBackReply, host=st.text(max_size=45), reached=ports),
    messages.UnreachableNotice: st.builds(
        messages.UnreachableNotice, peer_id=st.from_regex(r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")
    ),
    messages.LookAgain: st.just(messages.LookAgain()),
    messages.ForgetConnections: st.just(messages.ForgetConnections()),
    messages.Refusal: st.builds(messages.Refusal, code=names, message=st.text(max_size=2000)),
}
any_message = st.one_of(*MESSAGES.values())


def decoded_or_refused(data: bytes) -> None:
    """Nothing but a message or a `ProtocolViolation` comes out, whatever goes in."""
    with contextlib.suppress(ProtocolViolation):
        assert type(messages.decode_reachability(data)) in KINDS


def test_no_kind_of_message_is_left_out_here():
    assert list(MESSAGES) == KINDS


def test_the_protocol_is_none_of_the_others():
    known = {messages.PROTOCOL_ID, messages.MEMBERS_PROTOCOL_ID, messages.DIAL_BACK_PROTOCOL_ID}
    assert len(known) == 3


@given(any_message)
def test_what_a_peer_sends_arrives_as_it_was(message):
    decoded = messages.decode_reachability(messages.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(st.one_of(*(strategy for kind, strategy in MESSAGES.items() if kind is not messages.Refusal)))
def test_it_is_understood_in_no_other_conversation(message):
    for decode in (messages.decode_client, messages.decode_server, messages.decode_handshake):
        with pytest.raises(ProtocolViolation):
            decode(messages.encode(message))


@pytest.mark.parametrize("message", [messages.InfoRequest(), messages.ProbeReply(), messages.CloseSession()])
def test_no_other_message_is_understood_here(message):
    with pytest.raises(ProtocolViolation, match="not a message about reachability"):
        messages.decode_reachability(messages.encode(message))


@given(st.binary(max_size=100))
def test_garbage_never_raises_anything_else(data):
    decoded_or_refused(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6),
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


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(["DialBackRequest"], id="request without ports"),
        pytest.param(["DialBackRequest", [1] * (MAX_PORTS + 1)], id="too many ports"),
        pytest.param(["DialBackRequest", [0]], id="port 0"),
        pytest.param(["DialBackRequest", [65536]], id="port beyond any"),
        pytest.param(["DialBackRequest", [-1]], id="negative port"),
        pytest.param(["DialBackRequest", [True]], id="port is a truth value"),
        pytest.param(["DialBackRequest", [22.0]], id="port is a fraction"),
        pytest.param(["DialBackRequest", "22"], id="ports as text"),
        pytest.param(["DialBackRequest", 22], id="ports as a number"),
        pytest.param(["DialBackRequest", [22], HOST], id="request with a host"),
        pytest.param(["DialBackReply", HOST], id="reply without ports"),
        pytest.param(["DialBackReply", [22], HOST], id="reply in another order"),
        pytest.param(["DialBackReply", "1" * 46, [22]], id="host too long"),
        pytest.param(["DialBackReply", HOST.encode(), [22]], id="host as bytes"),
        pytest.param(["DialBackReply", HOST, [1] * (MAX_PORTS + 1)], id="too many ports reached"),
        pytest.param(["DialBackReply", HOST, [22], True], id="reply with more"),
        pytest.param(["UnreachableNotice", ""], id="notice about nobody"),
        pytest.param(["UnreachableNotice", "p" * 129], id="notice about too long an id"),
        pytest.param(["UnreachableNotice", None], id="notice about nothing"),
        pytest.param(["UnreachableNotice", "QmRAa9\n"], id="notice about an id with a line break"),
        pytest.param(["UnreachableNotice", "0OIl"], id="notice about what is not base58"),
        pytest.param(["LookAgain", HOST], id="look again, with a field"),
        pytest.param(["ForgetConnections", "peer"], id="forget somebody else's connections"),
    ],
)
def test_fields_outside_of_the_schema(fields):
    with pytest.raises(ProtocolViolation):
        messages.decode_reachability(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "data",
    [b"\x91" * 100_000, b"\x92\xafDialBackRequest\xdd\xff\xff\xff\xff", b"\x92\xafDialBackRequest" + b"\x91" * 100_000],
    ids=["deep arrays", "four thousand million ports announced", "deep ports"],
)
def test_no_message_at_all(data):
    with pytest.raises(ProtocolViolation):
        messages.decode_reachability(data)


def test_a_refusal_can_be_read():
    refusal = messages.refusal(RequestRefused("too many requests"))
    assert messages.decode_reachability(messages.encode(refusal)) == refusal
