"""Measuring links, towards honest, broken and hostile peers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarm.errors import CacheFull, PeerLost, ProtocolViolation, RemoteError
from swarm.protocol import messages
from swarm.transport import ping
from swarm.transport.ping import PING_SAMPLES, PROBE_SIZES_BYTES, measure_bandwidth, measure_round_trip, ping_many
from swarm.transport.stream import Stream
from tests.memory_hub import MemoryHub, MemoryNetwork

PATIENCE, SHORT = 20.0, 0.05
INFO = messages.InfoReply(0, 3, 100, 0, "1")
Answer = tuple[Any, bytes] | str | None
"""A reply and its payload, None for silence, or "hang up"."""


class Link:
    """A clock that only a simulated link moves on."""

    def __init__(self, latency: float = 0.0, up: float = math.inf, down: float = math.inf) -> None:
        self.latency, self.up, self.down = latency, up, down
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def carry(self, sent: int, received: int) -> None:
        self.now += self.latency + sent / self.up + received / self.down


class FakePeer:
    """Answers everything rightly until the `script` says otherwise; then it is silent."""

    def __init__(self, *script: Answer, link: Link | None = None) -> None:
        self.script = script
        self.link = link or Link()
        self.requests: list[messages.ClientMessage] = []
        self.bytes = 0
        self.open_streams = 0
        self.ended = asyncio.Event()

    async def __call__(self, stream: Stream) -> None:
        self.open_streams += 1
        try:
            await self._answer(stream)
        except PeerLost:
            pass
        finally:
            stream.close()
            self.open_streams -= 1
            self.ended.set()

    async def _answer(self, stream: Stream) -> None:
        script = iter(self.script)
        while True:
            frame = await stream.receive()
            request = messages.decode_client(frame.header)
            self.requests.append(request)
            answer = next(script, None) if self.script else right(request)
            if answer == "hang up":
                return
            if isinstance(answer, tuple):
                self.bytes += len(frame.payload) + len(answer[1])
                self.link.carry(len(frame.payload), len(answer[1]))
                await stream.send(*answer)


def right(request: messages.ClientMessage) -> Answer:
    if isinstance(request, messages.ProbeRequest):
        return messages.ProbeReply(), bytes(request.reply_bytes)
    assert isinstance(request, messages.InfoRequest)
    return INFO, b""


class Swarm:
    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.network = MemoryNetwork(self.hub, "me")

    async def add(self, name: str, peer: Callable[[Stream], Awaitable[None]]) -> Any:
        await MemoryNetwork(self.hub, name).serve(peer)
        return peer


def run(scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def whole() -> None:
        swarm = Swarm()
        async with asyncio.timeout(PATIENCE):
            await scenario(swarm)
        for task in swarm.hub.tasks:
            task.cancel()

    asyncio.run(whole())


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Link], Link]:
    """Make `ping` look at the link's clock."""

    def use(link: Link) -> Link:
        monkeypatch.setattr(ping, "time", SimpleNamespace(perf_counter=link.perf_counter))
        return link

    return use


def test_a_round_trip_is_the_shortest_and_without_the_first(use):
    link = use(Link())
    durations = iter([0.001, 9.0, 0.5, 7.0])  # the first is shortest here, and does not count all the same
    assert PING_SAMPLES == 3

    async def scenario(swarm):
        peer = await swarm.add("peer", FakePeer(link=link))
        link.carry = lambda sent, received: setattr(link, "now", link.now + next(durations))
        assert await measure_round_trip(swarm.network, "peer") == pytest.approx(0.5)
        await peer.ended.wait()
        assert [type(request) for request in peer.requests] == [messages.InfoRequest] * 4

    run(scenario)


@pytest.mark.parametrize(("latency", "up", "down"), [(0.0, 1e9, 1e9), (0.01, 1e4, 1e4), (0.2, 1e5, 4e4)])
def test_each_direction_has_a_bandwidth_of_its_own(use, latency, up, down):
    link = use(Link(latency, up, down))

    async def scenario(swarm):
        peer = await swarm.add("peer", FakePeer(link=link))
        found = await measure_bandwidth(swarm.network, "peer")
        assert (found.up, found.down) == (pytest.approx(up), pytest.approx(down))
        assert peer.bytes <= 4 << 20
        if up == 1e4:  # a slow link is not burdened for long
            assert peer.bytes == 2 * PROBE_SIZES_BYTES[0]

    run(scenario)


def test_a_round_trip_that_was_slow_by_chance_leaves_a_finite_positive_bandwidth(use):
    link = use(Link(5.0, 1e9, 1e9))

    async def scenario(swarm):
        async def peer(stream):
            for answered in range(4 + 2 * len(PROBE_SIZES_BYTES)):
                frame = await stream.receive()
                if answered == 4:
                    link.latency = 0.001  # the probes are faster than any of the pings were
                link.carry(1, 1)
                await stream.send(*right(messages.decode_client(frame.header)))

        await swarm.add("peer", peer)
        found = await measure_bandwidth(swarm.network, "peer")
        assert 0 < found.up < math.inf
        assert 0 < found.down < math.inf

    run(scenario)


def test_a_peer_that_answers_before_it_is_asked_has_a_finite_bandwidth(use):
    use(Link())  # a clock that stands still

    async def scenario(swarm):
        async def peer(stream):
            for _ in range(4):
                await stream.send(INFO)
            for upward in (True, False):
                for size in PROBE_SIZES_BYTES:
                    await stream.send(messages.ProbeReply(), bytes(0 if upward else size))
            await stream.discard_incoming()

        await swarm.add("peer", peer)
        found = await measure_bandwidth(swarm.network, "peer")
        assert 0 < found.up < math.inf
        assert 0 < found.down < math.inf

    run(scenario)


WRONG = [
    pytest.param((messages.ProbeReply(), b""), ProtocolViolation, "with a ProbeReply", id="wrong type"),
    pytest.param((INFO, b"x" * (10 << 20)), ProtocolViolation, "payload of 10485760 bytes", id="ten megabytes"),
    pytest.param((msgspec.Raw(b"\xc1"), b""), ProtocolViolation, "not a valid reply", id="garbage"),
    pytest.param((messages.Refusal("cache_full", "no"), b""), CacheFull, "refused: no", id="refusal"),
    pytest.param((messages.Refusal("of the future", "no"), b""), RemoteError, "refused: no", id="unknown refusal"),
    pytest.param("hang up", PeerLost, "closed the connection", id="hung up"),
    pytest.param(None, PeerLost, "did not answer within 0.05 s", id="silent"),
]


@pytest.mark.parametrize(("answer", "kind", "why"), WRONG)
def test_wrong_answers_are_typed_errors_in_time(answer, kind, why):
    async def scenario(swarm):
        peer = await swarm.add("peer", FakePeer(answer))
        with pytest.raises(kind, match=why):
            await measure_round_trip(swarm.network, "peer", SHORT if answer is None else PATIENCE)
        await peer.ended.wait()  # the stream was closed
        assert await ping_many(swarm.network, ["peer"], timeout_s=SHORT) == {}

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        pytest.param((messages.ProbeReply(), b"x"), ProtocolViolation, "payload of 1 bytes", id="payload"),
        pytest.param(None, PeerLost, "did not answer", id="silent"),
    ],
)
def test_a_wrong_answer_to_a_probe(answer, kind, why):
    async def scenario(swarm):
        peer = await swarm.add("peer", FakePeer(*[(INFO, b"")] * (1 + PING_SAMPLES), answer))
        with pytest.raises(kind, match=why):
            await measure_bandwidth(swarm.network, "peer", SHORT if answer is None else PATIENCE)
        await peer.ended.wait()

    run(scenario)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_probe_that_brings_another_number_of_bytes(change):
    async def scenario(swarm):
        upward = [(messages.ProbeReply(), b"")] * len(PROBE_SIZES_BYTES)
        wrong = (messages.ProbeReply(), bytes(PROBE_SIZES_BYTES[0] + change))
        await swarm.add("peer", FakePeer(*[(INFO, b"")] * (1 + PING_SAMPLES), *upward, wrong))
        with pytest.raises(ProtocolViolation, match=f"{PROBE_SIZES_BYTES[0] + change} bytes"):
            await measure_bandwidth(swarm.network, "peer")

    run(scenario)


class StuckNetwork:
    """Connections are never made, or nobody reads what is sent."""

    peer_id = "me"

    def __init__(self, where: str) -> None:
        self.where = where
        self.closed = 0

    async def open_stream(self, peer_id: str) -> Any:
        if self.where == "open":
            await asyncio.Event().wait()
        return SimpleNamespace(peer_id=peer_id, send=self.never, receive=self.never, close=self.close)

    async def never(self, *args: Any) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        self.closed += 1


def test_a_peer_that_cannot_be_written_to_is_lost_in_time():
    async def scenario(swarm):
        for where, closed in (("open", 0), ("send", 2)):
            network = StuckNetwork(where)
            for measure in (measure_round_trip, measure_bandwidth):
                with pytest.raises(PeerLost, match="did not answer"):
                    await measure(network, "peer", SHORT)
            assert network.closed == closed

    run(scenario)


def test_many_peers_of_which_some_can_be_measured():
    async def scenario(swarm):
        good = [await swarm.add(f"good {number}", FakePeer()) for number in range(5)]
        for number, (answer, _, _) in enumerate(case.values for case in WRONG if case.values[0] is not None):
            await swarm.add(f"bad {number}", FakePeer(answer))
        names = [*swarm.hub.handlers, "nobody", "good 0", "me"]
        found = await ping_many(swarm.network, names, concurrency=3)
        assert set(found) == {f"good {number}" for number in range(5)}
        assert all(0 <= seconds < PATIENCE for seconds in found.values())
        assert all(len(peer.requests) == 1 + PING_SAMPLES for peer in good)  # each of them once
        assert await ping_many(swarm.network, []) == {}

    run(scenario)


def test_so_many_at_a_time_and_no_more():
    async def scenario(swarm):
        full, everyone_may_answer = asyncio.Event(), asyncio.Event()
        now = most = 0

        async def peer(stream):
            nonlocal now, most
            now += 1
            most = max(most, now)
            if now == 4:
                full.set()
            await everyone_may_answer.wait()
            try:
                await FakePeer()(stream)
            finally:
                now -= 1

        for number in range(12):
            await swarm.add(str(number), peer)
        pinging = asyncio.create_task(ping_many(swarm.network, map(str, range(12)), concurrency=4))
        await full.wait()
        everyone_may_answer.set()
        assert len(await pinging) == 12
        assert most <= 5  # a stream that is closed here may still end over there

    run(scenario)


def test_silent_peers_do_not_hold_up_the_others_beyond_the_limit():
    async def scenario(swarm):
        silent = [await swarm.add(f"silent {number}", FakePeer(None)) for number in range(4)]
        await swarm.add("good", FakePeer())
        found = await ping_many(swarm.network, ["good", *swarm.hub.handlers], concurrency=2, limit=0.2, timeout_s=60)
        assert set(found) == {"good"}
        for peer in silent:
            assert not peer.requests or await peer.ended.wait()

    run(scenario)
