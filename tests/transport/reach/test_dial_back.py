"""Requests to dial back, and those who ask for it, in memory. Times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DialerBusy, PeerLost, ProtocolViolation, RemoteError, RequestRefused, ServerFault
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.protocol.messages import DialBackReply, DialBackRequest
from swarm.protocol.messages.peers import MAX_PORTS
from swarm.transport.reach.dial_back import (
    ASK_TIMEOUT_S,
    BURST,
    BURST_OF_NETWORK,
    REFILL_OF_NETWORK_PER_S,
    REQUEST_TIMEOUT_S,
    DialBack,
    ask,
)
from swarm.transport.reach.dialer import DIAL_TIMEOUT_S, MAX_FAR_S
from swarm.transport.reach.reach_estimate import DialReport
from tests import virtual_time
from tests.memory_hub import stream_pair
from tests.transport.reach.fakes import no_distance

HOST = "81.2.69.142"
FROM = f"/ip4/{HOST}/tcp/50123"
RELAY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
BEHIND_RELAYS = [
    f"/ip4/8.8.8.8/tcp/31337/p2p/{RELAY}/p2p-circuit",
    f"/ip4/8.8.8.8/tcp/31337/p2p/{RELAY}/p2p-circuit/p2p/{RELAY}",
    f"/ip6/2a02:8071:b783::1/tcp/31337/p2p/{RELAY}/p2p-circuit",
    f"/p2p/{RELAY}/p2p-circuit",
    "/p2p-circuit",
]


class Dials:
    """Stands in for `Dialer`: notes who is dialed where, and answers at some ports, or after some time."""

    def __init__(self, *reached: int, seconds: float = 0.0) -> None:
        self.dialed: list[tuple[str, str]] = []
        self.timeouts: list[float] = []
        self._reached = reached
        self._seconds = seconds

    async def dial(self, peer_id: str, address: str, timeout_s: float) -> None:
        self.dialed.append((peer_id, address))
        self.timeouts.append(timeout_s)
        await asyncio.sleep(self._seconds)
        if int(address.rpartition("/")[2]) not in self._reached:
            raise PeerLost("nobody answers there")


class Exchange:
    """A peer "home" that asks, and one that dials back."""

    def __init__(self, dials: Dials, *on_notice: Any, distance: Any = no_distance) -> None:
        self.dials = dials
        self._answers: Any = DialBack(dials, distance, *on_notice)

    async def request(self, ports: list[int], address: str = FROM) -> DialReport:
        ours, theirs = stream_pair("home", "judge")
        report, _ = await asyncio.gather(ask(ours, ports), self._answers.serve(theirs, address))
        return report

    async def is_refused(self, ports: list[int], address: str = FROM) -> bool:
        try:
            await self.request(ports, address)
        except RequestRefused:
            return True
        return False

    async def serve(self, frame: bytes | None, ends: bool = True) -> None:
        """Answer what comes as these bytes, and nothing after them."""
        ours, theirs = stream_pair("home", "judge")
        if frame is not None:
            ours._writer.write(frame)
        if ends:
            ours.close()
        await self._answers.serve(theirs, FROM)


def framed(header: bytes, payload: int = 0) -> bytes:
    return encode_prefix(len(header), payload) + header + bytes(payload)


def run(scenario: Awaitable[None]) -> None:
    async def whole() -> None:
        await scenario

    virtual_time.run(whole)


def test_the_ports_that_answer_are_reported_with_the_address_from_which_the_request_comes():
    async def scenario():
        exchange = Exchange(Dials(80, 31337))
        assert await exchange.request([31337, 22, 80]) == DialReport(HOST, frozenset({80, 31337}))
        assert await exchange.request([22]) == DialReport(HOST, frozenset())

    run(scenario())


def test_a_peer_that_is_far_away_gets_more_time_to_answer():
    async def scenario():
        for seconds, more in [(0.0, 0.0), (0.6, 3.0), (60.0, MAX_FAR_S)]:

            async def distance(peer_id: str, seconds: float = seconds) -> float:
                assert peer_id == "home"
                return seconds

            exchange = Exchange(dials := Dials(80), distance=distance)
            assert await exchange.request([80]) == DialReport(HOST, frozenset({80}))
            assert dials.timeouts == [DIAL_TIMEOUT_S + more]

    run(scenario())


def test_nobody_but_who_asks_is_dialed_and_nowhere_but_where_the_request_comes_from():
    async def scenario():
        exchange = Exchange(Dials())
        await exchange.request([31337, 22])
        await exchange.request([31337], "/ip6/2a02:8071:b783::1/tcp/50123")
        assert exchange.dials.dialed == [
            ("home", f"/ip4/{HOST}/tcp/31337"),
            ("home", f"/ip4/{HOST}/tcp/22"),
            ("home", "/ip6/2a02:8071:b783::1/tcp/31337"),
        ]

    run(scenario())


def test_a_peer_that_could_not_be_dialed_because_others_were_is_refused_and_not_called_unreachable():
    class Busy(Dials):
        async def dial(self, peer_id: str, address: str, timeout_s: float) -> None:
            if address.endswith("/31337"):
                raise DialerBusy("the time was spent on others")
            await super().dial(peer_id, address, timeout_s)

    async def scenario():
        with pytest.raises(RequestRefused, match="busy dialing others back; ask another peer"):
            await Exchange(Busy(22)).request([22, 31337])

    run(scenario())


def test_who_names_no_port_only_learns_from_where_it_is_seen_as_often_as_it_likes():
    async def scenario():
        exchange = Exchange(Dials())
        for _ in range(100):
            assert await exchange.request([]) == DialReport(HOST, frozenset())
        assert exchange.dials.dialed == []
        assert not await exchange.is_refused([1] * MAX_PORTS)  # all of that cost nothing

    run(scenario())


def test_who_comes_through_a_relay_is_refused():
    async def scenario():
        for address in [
            *BEHIND_RELAYS,
            "/dns4/localhost/tcp/22",
            "/unix/tmp/socket",
        ]:
            for ports in [
                [],
                [31337],
            ]:
                exchange = Exchange(Dials(31337))
                with pytest.raises(RequestRefused, match="through a relay"):
                    await exchange.request(ports, address)
                assert exchange.dials.dialed == []

    run(scenario())


def test_what_is_no_request_to_dial_back():
    async def scenario():
        for header in [
            msgspec.msgpack.encode(["DialBackRequest", [1] * (MAX_PORTS + 1)]),
            msgspec.msgpack.encode(["DialBackRequest", [0]]),
            msgspec.msgpack.encode(["DialBackRequest", [22], "8.8.8.8"]),
            messages.encode(DialBackReply(HOST, [22])),
            messages.encode(messages.InfoRequest()),
            b"\xc1\xff\x00",
        ]:
            exchange = Exchange(Dials())
            with pytest.raises(ProtocolViolation):
                await exchange.serve(framed(header))
            assert exchange.dials.dialed == []

    run(scenario())


def test_what_is_no_frame_of_a_request():
    async def scenario():
        for frame, error in [
            (framed(messages.encode(DialBackRequest([22])), payload=1), ProtocolViolation),
            (encode_prefix(2**31, 0), ProtocolViolation),
            (framed(messages.encode(DialBackRequest([22])))[:-1], PeerLost),
            (b"", PeerLost),
        ]:
            exchange = Exchange(Dials())
            with pytest.raises(error):
                await exchange.serve(frame)
            assert exchange.dials.dialed == []

    run(scenario())


def test_a_notice_is_handed_on_and_nobody_is_dialed():
    async def scenario():
        notice = messages.UnreachableNotice("somebody")
        taken: list[object] = []

        async def take(message: object, sender: str, address: str) -> None:
            taken.append((message, sender, address))

        exchange = Exchange(Dials(), take)
        await exchange.serve(framed(messages.encode(notice)))
        assert taken == [(notice, "home", FROM)]
        assert exchange.dials.dialed == []
        await Exchange(Dials()).serve(framed(messages.encode(notice)))  # where nobody wants to know, nothing happens

    run(scenario())


@given(st.binary(max_size=60))
def test_garbage_has_nobody_dialed(data):
    async def scenario():
        exchange = Exchange(Dials())
        with pytest.raises((PeerLost, ProtocolViolation)):
            await exchange.serve(data)
        assert exchange.dials.dialed == []

    asyncio.run(scenario())


def test_who_opens_a_stream_and_is_silent_is_not_waited_for():
    async def scenario():
        with pytest.raises(PeerLost):
            await Exchange(Dials()).serve(encode_prefix(10, 0) + b"\x92", ends=False)
        assert asyncio.get_running_loop().time() == REQUEST_TIMEOUT_S

    run(scenario())


def test_a_flood_from_one_network_is_refused_and_others_are_still_answered():
    async def scenario():
        exchange = Exchange(Dials())
        for number in range(int(BURST_OF_NETWORK)):
            assert not await exchange.is_refused([1], f"/ip4/81.2.69.{number}/tcp/50123")
        assert await exchange.is_refused([1], "/ip4/81.2.69.200/tcp/50123")
        assert await exchange.is_refused([1], FROM)
        assert len(exchange.dials.dialed) == BURST_OF_NETWORK
        assert not await exchange.is_refused([], FROM)
        assert not await exchange.is_refused([1, 2, 3, 4], "/ip4/81.2.70.1/tcp/50123")
        await asyncio.sleep(1 / REFILL_OF_NETWORK_PER_S + 0.01)
        assert await exchange.is_refused([1, 2], FROM)
        assert not await exchange.is_refused([1], FROM)
        assert await exchange.is_refused([1], FROM)

    run(scenario())


def test_a_flood_from_many_networks_has_only_so_many_ports_dialed():
    async def scenario():
        exchange = Exchange(Dials())
        refused = [await exchange.is_refused([1], f"/ip4/81.{number}.1.1/tcp/50123") for number in range(200)]
        assert refused == [False] * int(BURST) + [True] * (200 - int(BURST))
        assert len(exchange.dials.dialed) == BURST
        await asyncio.sleep(5.01)
        refused = [await exchange.is_refused([1], f"/ip4/82.{number}.1.1/tcp/50123") for number in range(10)]
        assert refused == [False] * 5 + [True] * 5

    run(scenario())


def test_a_request_that_is_refused_costs_nothing():
    async def scenario():
        exchange = Exchange(Dials())
        for _ in range(int(BURST_OF_NETWORK) - 1):
            assert not await exchange.is_refused([1])
        for _ in range(100):
            assert await exchange.is_refused([1, 2])
        assert not await exchange.is_refused([1])
        for number in range(int(BURST - BURST_OF_NETWORK)):
            assert not await exchange.is_refused([1], f"/ip4/81.{number}.1.1/tcp/50123")

    run(scenario())


def test_ports_are_charged_however_often_they_are_named():
    async def scenario():
        exchange = Exchange(Dials())
        assert not await exchange.is_refused([1, 1, 1, 1])
        assert exchange.dials.dialed == [("home", f"/ip4/{HOST}/tcp/1")]
        assert not await exchange.is_refused([1, 1, 1, 1])
        assert await exchange.is_refused([1])

    run(scenario())


async def asked(ports: list[int], *frames: bytes, ends: bool = True) -> DialReport:
    """What a peer learns that asks another one, which answers with these bytes."""
    ours, theirs = stream_pair("home", "judge")

    async def answer() -> None:
        request = await theirs.receive(0)
        assert messages.decode_reachability(request.header) == DialBackRequest(ports)
        for frame in frames:
            theirs._writer.write(frame)
        if ends:
            theirs.close()

    report, _ = await asyncio.gather(ask(ours, ports), answer())
    return report


def reply(*fields: object) -> bytes:
    return framed(msgspec.msgpack.encode(["DialBackReply", *fields]))


def test_ports_that_were_not_asked_about_are_not_believed():
    async def scenario():
        assert await asked([31337, 80], reply(HOST, [22, 80, 443, 80])) == DialReport(HOST, frozenset({80}))
        assert await asked([], reply(HOST, [22])) == DialReport(HOST, frozenset())

    run(scenario())


def test_an_address_is_always_written_in_the_same_way():
    async def scenario():
        report = await asked([80], reply("2A02:8071:B783:0:0:0:0:1", [80]))
        assert report == DialReport("2a02:8071:b783::1", frozenset({80}))

    run(scenario())


def test_what_a_peer_that_dials_back_cannot_say():
    async def scenario():
        for answer in [
            reply("swarm.example", [80]),
            reply("", [80]),
            reply("81.2.69.142/tcp/22", [80]),
            reply("fe80::1%\x1b[2J", [80]),
            reply("2a02::1%/p2p-circuit", [80]),
            reply(HOST, [80] * 5),
            reply(HOST, [0]),
            reply(HOST),
            framed(messages.encode(DialBackRequest([80]))),
            framed(messages.encode(DialBackReply(HOST, [80])), payload=1),
            framed(b"\xc1"),
            encode_prefix(0, 2**40),
        ]:
            with pytest.raises(ProtocolViolation):
                await asked([80], answer)

    run(scenario())


def test_a_refusal_is_passed_on_as_one_harmless_line():
    async def scenario():
        refusal = messages.Refusal("request_refused", "too many\n\x1b[2Jrequests")
        with pytest.raises(RequestRefused) as caught:
            await asked([80], framed(messages.encode(refusal)))
        assert str(caught.value).isprintable()
        assert "too many" in str(caught.value)
        with pytest.raises(ServerFault):
            await asked([80], framed(messages.encode(messages.Refusal("unheard of", "no"))))

    run(scenario())


def test_a_peer_that_does_not_answer_is_not_waited_for():
    async def scenario():
        with pytest.raises(PeerLost, match=f"did not dial back within {ASK_TIMEOUT_S:g} s"):
            await asked([80], reply(HOST, [80])[:-1], ends=False)
        assert asyncio.get_running_loop().time() == ASK_TIMEOUT_S

    run(scenario())


@given(st.binary(max_size=60))
def test_no_answer_raises_anything_but_a_remote_error(data):
    async def scenario():
        with pytest.raises(RemoteError):
            await asked([80], data)

    asyncio.run(scenario())
