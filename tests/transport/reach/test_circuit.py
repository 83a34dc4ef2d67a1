"""What relays answer to a peer that wants a place, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest
import uvloop
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from swarm.errors import PeerLost, ProtocolViolation, RelayRefused
from swarm.transport import daemon_streams
from swarm.transport.daemon import DaemonOptions, start_daemon
from swarm.transport.process_folder import ProcessFolder
from swarm.transport.reach.circuit import (
    LIBP2P_LIMITS,
    MAX_ANSWER_BYTES,
    MAX_PLACE_S,
    MIN_PLACE_S,
    RELAY_PROTOCOL_ID,
    HopMessage,
    Place,
    ask_for_place,
    encode_reserve,
    place_granted,
)
from tests import virtual_time
from tests.transport.reach.fakes import Writer, grant, peer_id, refuse, with_length

NOW = 1.7e9
RELAY = PeerID.from_base58(peer_id("relay"))

# hivemind leaves connections to its own daemon to the garbage collector.
leaves_sockets = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")


def granted_or_refused(answer: bytes) -> None:
    """Nothing but a time within its limits, `RelayRefused` or `ProtocolViolation` comes out, whatever goes in."""
    with contextlib.suppress(RelayRefused, ProtocolViolation):
        assert MIN_PLACE_S <= place_granted(answer, NOW).seconds <= MAX_PLACE_S


def test_the_request_is_the_one_of_the_specification():
    assert encode_reserve() == b"\x02\x08\x00"


def test_a_place_is_granted_for_the_time_that_is_left():
    assert place_granted(grant(int(NOW) + 3600), NOW).seconds == 3600
    assert place_granted(grant(int(NOW) + 60, addrs=[b"x", b"y"], voucher=b"z" * 500), NOW).seconds == 60


def test_a_relay_says_how_much_it_carries():
    for limit, expected in [
        ({"duration": 86400, "data": 1 << 36}, (86400, 1 << 36)),
        ({"duration": 120, "data": 1 << 17}, (120, 1 << 17)),
        ({"duration": 2**32 - 1, "data": 2**64 - 1}, (2**32 - 1, 2**64 - 1)),
        ({}, (0, 0)),
        (None, (0, 0)),
    ]:
        answer = HopMessage(type=2, status=100, reservation={"expire": int(NOW) + 60}, limit=limit).SerializeToString()
        place = place_granted(answer, NOW)
        assert place == Place(60, *expected)
        assert place.is_too_small is (expected == LIBP2P_LIMITS)


def test_no_place_counts_for_longer_than_a_day():
    for expire in [
        int(NOW) + 86401,
        10**18,
        2**63,
        2**64 - 1,
    ]:
        assert place_granted(grant(expire), NOW).seconds == MAX_PLACE_S


def test_a_place_that_is_over_counts_for_as_long_as_a_wrong_clock_may_be_the_reason():
    for expire in [
        0,
        1,
        int(NOW) - 86400,
        int(NOW),
        int(NOW) + 9,
    ]:
        assert place_granted(grant(expire), NOW).seconds == MIN_PLACE_S


def test_a_grant_without_a_time_counts_for_the_shortest():
    assert place_granted(refuse(100), NOW).seconds == MIN_PLACE_S


def test_a_relay_that_refuses_says_why():
    for status, reason in [
        (200, "it has refused"),
        (201, "no place left"),
        (202, "does not relay for this peer"),
        (400, "did not understand"),
        (401, "did not expect"),
        (0, "status 0"),
        (-1, "status -1"),
        (2**31 - 1, "status 2147483647"),
    ]:
        with pytest.raises(RelayRefused, match=reason):
            place_granted(refuse(status), NOW)


def test_what_is_no_answer():
    for answer in [
        b"",
        grant(int(NOW) + 60)[:-1],
        b"\xff" * 50,
        HopMessage(type=2).SerializeToString(),
        HopMessage(type=2, reservation={"expire": 10**10}).SerializeToString(),
        HopMessage(type=0, status=100).SerializeToString(),
        HopMessage(type=1, status=100).SerializeToString(),
        HopMessage(type=-1, status=100).SerializeToString(),
        HopMessage(status=100).SerializeToString(),
        b"\x0a\x01\x02\x28\x64",
        b"\x08\x02\x28\x64\x1a\x05\x08",
        b"\x08\x02\x28\x64\x1a\x02\x08\xff",
    ]:
        with pytest.raises(ProtocolViolation):
            place_granted(answer, NOW)


def test_fields_of_later_versions_are_passed_over():
    assert place_granted(grant(int(NOW) + 60) + b"\xfa\x07\x03new", NOW).seconds == 60


@given(st.binary(max_size=100))
def test_garbage_never_raises_anything_else(answer):
    granted_or_refused(answer)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=40), st.data())
def test_a_damaged_answer_never_raises_anything_else(expire, voucher, data):
    answer = bytearray(grant(expire, voucher=voucher))
    for _ in range(data.draw(st.integers(1, 3))):
        answer[data.draw(st.integers(0, len(answer) - 1))] = data.draw(st.integers(0, 255))
    granted_or_refused(bytes(answer))
    granted_or_refused(bytes(answer[: data.draw(st.integers(0, len(answer)))]))


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
            granted.append((await ask_for_place(None, RELAY, timeout_s)).seconds)
        finally:
            assert relay.writer.aborted
            assert relay.requests == [encode_reserve()]
            assert relay.asked_for == [(RELAY, RELAY_PROTOCOL_ID)]
            relay._sending.cancel()

    virtual_time.run(scenario)
    return granted[0]


def test_a_relay_grants_a_place(monkeypatch):
    assert reserve_at(PlayedRelay(with_length(grant(int(NOW) + 60))), monkeypatch) == 60


def test_the_stream_is_not_waited_for_to_end(monkeypatch):
    assert reserve_at(PlayedRelay(with_length(grant(int(NOW) + 60)), ends=False), monkeypatch) == 60


def test_an_answer_in_pieces(monkeypatch):
    answer = with_length(grant(int(NOW) + 60, voucher=b"v" * 200))
    assert answer[0] & 0x80  # the length itself has two bytes
    relay = PlayedRelay(answer[:1], answer[1:2], answer[2:50], answer[50:])
    assert reserve_at(relay, monkeypatch) == 60


def test_an_answer_may_be_as_long_as_is_allowed(monkeypatch):
    head = len(grant(int(NOW) + 60, voucher=b"v" * (MAX_ANSWER_BYTES - 100))) - (MAX_ANSWER_BYTES - 100)
    longest = grant(int(NOW) + 60, voucher=b"v" * (MAX_ANSWER_BYTES - head))
    assert len(longest) == MAX_ANSWER_BYTES
    assert reserve_at(PlayedRelay(with_length(longest)), monkeypatch) == 60


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(b"", PeerLost, id="nothing"),
        pytest.param(with_length(grant(10**10))[:-1], PeerLost, id="cut"),
        pytest.param(b"\x80", PeerLost, id="cut in its length"),
        pytest.param(b"\x00", ProtocolViolation, id="an empty answer"),
        pytest.param(with_length(b"\xff" * 20), ProtocolViolation, id="no protobuf"),
        pytest.param(with_length(HopMessage(type=0).SerializeToString()), ProtocolViolation, id="a request"),
        pytest.param(with_length(refuse(201)), RelayRefused, id="full"),
        pytest.param(with_length(grant(10**10, voucher=b"v" * MAX_ANSWER_BYTES)), ProtocolViolation, id="too long"),
        pytest.param(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", ProtocolViolation, id="length beyond any"),
        pytest.param(b"\x80" * 1000, ProtocolViolation, id="length without an end"),
    ],
)
def test_what_else_a_relay_may_send(answer, error, monkeypatch):
    with pytest.raises(error):
        reserve_at(PlayedRelay(answer), monkeypatch)


@pytest.mark.parametrize("answer", [b"", b"\x80", with_length(grant(10**10))[:-1], with_length(b"x")[:1]])
def test_a_relay_that_does_not_finish_its_answer_is_not_waited_for(answer, monkeypatch):
    with pytest.raises(PeerLost, match="did not answer within 5 s"):
        reserve_at(PlayedRelay(answer, ends=False), monkeypatch)


def test_a_relay_that_drips_its_answer_is_not_waited_for(monkeypatch):
    answer = with_length(grant(10**10, voucher=b"v" * 100))
    with pytest.raises(PeerLost, match="did not answer within 5 s"):
        reserve_at(PlayedRelay(*(answer[index : index + 1] for index in range(len(answer)))), monkeypatch)


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


@leaves_sockets
def test_a_real_relay_grants_a_place_and_a_peer_that_does_not_relay_grants_none():
    async def scenario():
        async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:

            async def start(**options: object) -> P2P:
                folder = ProcessFolder()
                stack.callback(folder.remove)
                p2p = await start_daemon(DaemonOptions(host_maddrs=["/ip4/127.0.0.1/tcp/0"], **options), folder.path)
                stack.push_async_callback(p2p.shutdown)
                return p2p

            relay, home = await start(relayed_peers=4, is_local=False), await start()
            _, (address, *_) = await relay._client.identify()
            with pytest.raises(PeerLost, match="cannot be used"):
                await ask_for_place(home, relay.peer_id, 20.0)  # nobody has said where it is
            await daemon_streams.connect(home, relay.peer_id, [Multiaddr(str(address))])
            assert 600 < (await ask_for_place(home, relay.peer_id, 20.0)).seconds <= MAX_PLACE_S
            assert 600 < (await ask_for_place(home, relay.peer_id, 20.0)).seconds <= MAX_PLACE_S  # renewed
            await relay.shutdown()
            with pytest.raises(PeerLost):
                await ask_for_place(home, relay.peer_id, 20.0)

    uvloop.run(scenario())
    gc.collect()  # while this test's filter holds
