"""What relays answer to a peer that wants a place, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from hivemind.p2p import P2PDaemonError, PeerID
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import MembershipNotProven, PeerLost, ProtocolViolation, RelayRefused, RequestRefused
from swarm.transport import daemon_streams
from swarm.transport.reach import circuit
from swarm.transport.reach.circuit import (
    MAX_MESSAGE_BYTES,
    MAX_PLACE_S,
    MIN_PLACE_S,
    RELAY_PROTOCOL_ID,
    RESERVE,
    HopMessage,
    StopMessage,
    ask_for_place,
    encode,
    place_granted,
)
from tests import virtual_time
from tests.transport.reach.fakes import Writer, grant, peer_id, refuse

NOW = 1.7e9
RELAY = PeerID.from_base58(peer_id("relay"))

# hivemind leaves connections to its own daemon to the garbage collector.


def received(data: bytes, kind: Any = HopMessage) -> Any:
    """The message that these bytes are, with its length in front."""

    async def receive() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await circuit.receive(reader, kind)

    return asyncio.run(receive())


def test_messages_are_those_of_the_specification():
    assert encode(HopMessage(type=RESERVE)) == b"\x02\x08\x00"
    offer = StopMessage(type=0, peer={"id": b"\x12\x20"}, limit={"duration": 7, "data": 300})
    assert encode(offer) == bytes.fromhex("0f 0800 1204 0a021220 1a05 0807 10ac02")
    for message in (offer, HopMessage(type=2, status=100, reservation={"expire": 2**64 - 1, "voucher": b"v" * 500})):
        assert received(encode(message), type(message)) == message


def test_a_place_is_granted_for_the_time_that_is_left():
    assert place_granted(grant(int(NOW) + 3600), NOW) == 3600
    for expire, seconds in (
        (2**64 - 1, MAX_PLACE_S),
        (int(NOW) + 86401, MAX_PLACE_S),
        (0, MIN_PLACE_S),
        (NOW, MIN_PLACE_S),
    ):
        assert place_granted(grant(int(expire)), NOW) == seconds  # its clock may be wrong
    later = grant(int(NOW) + 60).SerializeToString() + b"\xfa\x07\x03new"  # a field of a later version
    assert place_granted(HopMessage.FromString(later), NOW) == 60
    assert place_granted(grant(int(NOW) + 60, addrs=[b"x", b"y"], voucher=b"z" * 500), NOW) == 60


def test_a_relay_that_refuses_says_why():
    for status, reason in [
        (200, "it has refused"),
        (201, "no place left"),
        (2**31 - 1, "status 2147483647"),
    ]:
        with pytest.raises(RelayRefused, match=reason):
            place_granted(refuse(status), NOW)
    with pytest.raises(MembershipNotProven):
        place_granted(refuse(202), NOW)


def test_what_is_no_answer():
    for answer in [HopMessage(), HopMessage(type=2), HopMessage(type=0, status=100), HopMessage(status=100)]:
        with pytest.raises(ProtocolViolation):
            place_granted(answer, NOW)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=40), st.data())
def test_a_damaged_answer_never_raises_anything_else(expire, voucher, data):
    """Nothing but a time within its limits comes out of it, or an error that says what is wrong."""
    answer = bytearray(encode(grant(expire, voucher=voucher)))
    for _ in range(data.draw(st.integers(1, 3))):
        answer[data.draw(st.integers(0, len(answer) - 1))] = data.draw(st.integers(0, 255))
    for damaged in (answer, answer[: data.draw(st.integers(0, len(answer)))]):
        with contextlib.suppress(RequestRefused, ProtocolViolation, asyncio.IncompleteReadError):
            assert MIN_PLACE_S <= place_granted(received(bytes(damaged)), NOW) <= MAX_PLACE_S


class PlayedRelay:
    """A relay that sends these pieces when it is asked, and then closes the stream, or leaves it open."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.requests: list[bytes] = []
        self.asked_for: list[tuple[PeerID, str]] = []
        self._pieces = pieces
        self._ends = ends
        self._reader: asyncio.StreamReader
        self.writer: Writer

    async def open_stream(self, p2p: object, peer: PeerID, protocol: str) -> tuple[asyncio.StreamReader, Writer]:
        self.asked_for.append((peer, protocol))
        self._reader, self.writer = asyncio.StreamReader(), Writer(self._answer)
        return self._reader, self.writer

    def _answer(self, request: bytes) -> None:
        self.requests.append(request)
        self._sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        for piece in self._pieces:
            self._reader.feed_data(piece)
            await asyncio.sleep(1)
        if self._ends:
            self._reader.feed_eof()


def reserve_at(relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> float:
    """For how long this relay grants a place; whatever happens, the stream is closed."""
    monkeypatch.setattr(daemon_streams, "open_stream", relay.open_stream)
    monkeypatch.setattr(time, "time", lambda: NOW)
    granted: list[float] = []

    async def scenario() -> None:
        try:
            granted.append(await ask_for_place(None, RELAY, timeout_s))
        finally:
            assert relay.writer.aborted
            assert relay.requests == [encode(HopMessage(type=RESERVE))]
            assert relay.asked_for == [(RELAY, RELAY_PROTOCOL_ID)]
            relay._sending.cancel()

    virtual_time.run(scenario)
    return granted[0]


def test_an_answer_in_pieces(monkeypatch):
    answer = encode(grant(int(NOW) + 60, voucher=b"v" * 200))
    assert answer[0] & 0x80  # the length itself has two bytes
    relay = PlayedRelay(answer[:1], answer[1:2], answer[2:50], answer[50:])
    assert reserve_at(relay, monkeypatch) == 60


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(b"", PeerLost, id="nothing"),
        pytest.param(encode(grant(10**10))[:-1], PeerLost, id="cut"),
        pytest.param(b"\x00", ProtocolViolation, id="an empty answer"),
        pytest.param(b"\x32" + b"\xff" * 50, ProtocolViolation, id="no protobuf message"),
        pytest.param(encode(refuse(201)), RelayRefused, id="full"),
        pytest.param(encode(grant(10**10, voucher=b"v" * MAX_MESSAGE_BYTES)), ProtocolViolation, id="too long"),
        pytest.param(b"\x80" * 1000, ProtocolViolation, id="length without an end"),
    ],
)
def test_what_else_a_relay_may_send(answer, error, monkeypatch):
    with pytest.raises(error):
        reserve_at(PlayedRelay(answer), monkeypatch)


def test_a_relay_that_does_not_finish_its_answer_is_not_waited_for(monkeypatch):
    with pytest.raises(PeerLost, match="did not answer within 5 s"):
        reserve_at(PlayedRelay(encode(grant(10**10))[:-1], ends=False), monkeypatch)


@pytest.mark.parametrize(
    "failure", [P2PDaemonError("no addresses"), ConnectionResetError(), asyncio.IncompleteReadError(b"", 1)], ids=repr
)
def test_a_relay_that_cannot_be_reached(failure, monkeypatch):
    async def open_stream(*_: object) -> None:
        raise failure

    async def scenario():
        with pytest.raises(PeerLost, match="cannot be used"):
            await ask_for_place(None, RELAY, 5.0)

    monkeypatch.setattr(daemon_streams, "open_stream", open_stream)
    asyncio.run(scenario())
