"""Whom a server pings, and the loop that does it, towards scripted peers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.dht.server_records import MAX_ROUND_TRIPS, decode_announcement, encode_announcement
from swarm.errors import PeerLost
from swarm.protocol import messages
from swarm.server.throughput import link_measurement as module
from swarm.server.throughput.link_measurement import (
    BANDWIDTH_PERIOD_S,
    BANDWIDTH_RETRY_S,
    MAX_PINGS,
    LinkMeasurement,
    choose_peers_to_ping,
    next_hop_candidates,
)
from swarm.transport.ping import Bandwidth
from swarm.transport.stream import Stream
from tests.async_tests import as_test
from tests.infos import server_info
from tests.memory_hub import MemoryHub, MemoryNetwork

PATIENCE = 60.0
HELD = Span(0, 2)


def names(servers: Sequence[ServerInfo]) -> tuple[list[str], list[str]]:
    return next_hop_candidates(servers, "me", Span(4, 8))


@pytest.mark.parametrize("state", [ServerState.JOINING, ServerState.OFFLINE])
def test_who_does_not_serve_is_no_neighbor(state):
    assert names([server_info(8, 12, "a", state=state), server_info(8, 12, "b")]) == (["b"], [])


spans = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


@given(spans, spans)
def test_a_neighbor_holds_a_block_that_follows_one_of_this_servers(own, other):
    behind, inside = next_hop_candidates([server_info(other.start, other.end)], "me", own)
    follows = [block for block in range(own.start, own.end) if block + 1 in other]
    assert bool(behind or inside) == bool(follows)
    assert bool(behind) == (own.end in other)


peers = st.integers(0, 30).map(lambda count: [f"peer {number}" for number in range(count)])


@given(peers, peers, st.dictionaries(st.integers(0, 29), st.floats(0, 100)), st.integers(0, 20), st.randoms())
def test_the_choice_is_bounded_fair_and_by_turn(behind, others, tried, limit, random):
    inside = [f"inner {peer}" for peer in others]
    when = {f"peer {number}": time for number, time in tried.items()}
    chosen = choose_peers_to_ping(behind, inside, when, random, limit)
    assert len(set(chosen)) == len(chosen) == min(limit, len(behind) + len(inside))
    assert set(chosen) <= {*behind, *inside}
    first = [peer for peer in chosen if peer in behind]
    assert len(first) >= min(len(behind), math.floor(limit * 0.75))
    assert len(chosen) - len(first) >= min(len(inside), math.floor(limit * 0.25))
    left_out = [when.get(peer, -math.inf) for peer in behind if peer not in first]
    assert all(when.get(peer, -math.inf) <= time for peer in first for time in left_out)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Swarm:
    """A view of scripted peers; what the server under test measures of them is given."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.network = MemoryNetwork(self.hub, "me")
        self.servers: list[ServerInfo] = [server_info(0, 2, "me")]
        self.clock = Clock()
        self.views = 0
        self.asked: list[str] = []

    async def add(self, name: str, start: int = 2, end: int = 4, serve: bool = True) -> None:
        self.servers.append(server_info(start, end, name))

        async def answer(stream: Stream) -> None:
            with suppress(PeerLost):
                self.asked.append(name)
                while True:
                    request = messages.decode_client((await stream.receive()).header)
                    if isinstance(request, messages.ProbeRequest):
                        await stream.send(messages.ProbeReply(), bytes(request.reply_bytes))
                    else:
                        await stream.send(messages.InfoReply(start, end, 0, 0, "1"))
            stream.close()

        if serve:
            await MemoryNetwork(self.hub, name).serve(answer)

    async def view(self) -> Sequence[ServerInfo]:
        self.views += 1
        return self.servers

    def measurement(self, span: Span | None = HELD, period: float = 60.0) -> LinkMeasurement:
        return LinkMeasurement(self.network, lambda: span, self.view, 16, period, Random(0), self.clock)


def run(scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def whole() -> None:
        swarm = Swarm()
        async with asyncio.timeout(PATIENCE):
            await scenario(swarm)
        for task in swarm.hub.tasks:
            task.cancel()

    asyncio.run(whole())


swarm_test = as_test(run, "swarm")


@pytest.fixture
def links(monkeypatch) -> dict[str, float | Exception]:
    """Bytes/s to each peer, or the error, in the place of a measurement; `asked` lists who was."""
    rates: dict[str, float | Exception] = {}

    async def fake(network, peer_id):
        found = rates[peer_id]
        if isinstance(found, Exception):
            raise found
        return Bandwidth(up=found * 5, down=found)

    monkeypatch.setattr(module, "measure_bandwidth", fake)
    return rates


@swarm_test()
async def test_links_to_neighbors_are_measured_and_fit_an_announcement(swarm):
    await swarm.add("next")
    await swarm.add("inside", 1, 2)
    await swarm.add("far", 3, 4)
    await swarm.add("silent", serve=False)
    one = swarm.measurement()
    await one.measure_once()
    assert {peer for peer, _ in one.round_trips} == {"next", "inside"}
    assert one.network_throughput > 0
    info = server_info(0, 2, "me", round_trips=one.round_trips, network_throughput=one.network_throughput)
    assert decode_announcement(encode_announcement("model", info)) == ("model", info)


@swarm_test()
async def test_the_announced_are_those_of_the_last_view_nearest_first_and_not_too_many(swarm, monkeypatch):
    count = MAX_ROUND_TRIPS + 10
    distances = {str(number): (number * 31 % count) / 100 for number in range(count)}

    async def fake(network, chosen, concurrency):
        assert concurrency >= len(chosen)
        return {peer: distances[peer] for peer in chosen}

    monkeypatch.setattr(module, "ping_many", fake)
    for name in distances:
        await swarm.add(name)
    one = swarm.measurement()
    for _ in range(math.ceil(count / MAX_PINGS)):
        await one.measure_once()
    nearest = sorted((seconds, peer) for peer, seconds in distances.items())[:MAX_ROUND_TRIPS]
    assert one.round_trips == tuple((peer, seconds) for seconds, peer in nearest)
    swarm.servers = swarm.servers[:3]
    await one.measure_once()
    assert {peer for peer, _ in one.round_trips} == {info.peer_id for info in swarm.servers[1:]}


@swarm_test()
async def test_peers_that_never_answer_do_not_crowd_out_the_others(swarm, monkeypatch):
    pinged: list[set[str]] = []

    async def fake(network, chosen, concurrency):
        pinged.append(set(chosen))
        return {peer: 0.1 for peer in chosen if peer.startswith("good")}

    monkeypatch.setattr(module, "ping_many", fake)
    for number in range(2 * MAX_PINGS):
        await swarm.add(f"dead {number}", serve=False)
    await swarm.add("good")
    one = swarm.measurement()
    for _ in range(9):
        await one.measure_once()
        swarm.clock.now += 30
    assert sum("good" in chosen for chosen in pinged) >= 3  # 33 peers, 16 a round: in three rounds at the latest
    assert one.round_trips == (("good", 0.1),)


@swarm_test()
async def test_the_link_is_the_median_over_peers_in_tokens_of_16_bit_values(swarm, links):
    for name, rate in [("a", 3200.0), ("b", 320.0), ("c", 1e12)]:
        await swarm.add(name)
        links[name] = rate
    one = swarm.measurement()
    await one.measure_once()
    assert one.network_throughput == 3200.0 / (16 * 2)


@swarm_test()
async def test_the_link_is_measured_rarely_and_again_soon_after_a_failure(swarm, links):
    one = swarm.measurement()
    await one.measure_once()  # nobody there: nothing to wait for
    await swarm.add("a")
    links["a"] = PeerLost("gone")
    await one.measure_once()
    assert one.network_throughput == 0.0
    links["a"] = 32.0
    swarm.clock.now += BANDWIDTH_RETRY_S - 1
    await one.measure_once()
    assert one.network_throughput == 0.0
    swarm.clock.now += 2
    await one.measure_once()
    assert one.network_throughput == 1.0
    links["a"] = 64.0
    swarm.clock.now += BANDWIDTH_PERIOD_S * 0.7
    await one.measure_once()
    assert one.network_throughput == 1.0
    swarm.clock.now += BANDWIDTH_PERIOD_S * 0.6
    await one.measure_once()
    assert one.network_throughput == 2.0
    links["a"] = PeerLost("gone")
    swarm.clock.now += BANDWIDTH_PERIOD_S * 1.3
    await one.measure_once()
    assert one.network_throughput == 2.0  # what is known of the link stays


@swarm_test()
async def test_the_loop_survives_everything_and_stops(swarm, monkeypatch):
    failures = iter([OSError("no network"), PeerLost("gone"), ValueError("a bug"), TimeoutError()])
    done = asyncio.Event()

    async def view():
        for error in failures:
            raise error
        done.set()
        return swarm.servers

    await swarm.add("next")
    one = LinkMeasurement(swarm.network, lambda: HELD, view, 16, 0.001, Random(0))
    one.start()
    await done.wait()
    while not one.round_trips:
        await asyncio.sleep(0.001)
    await one.stop()
    asked = len(swarm.asked)
    await asyncio.sleep(0.01)
    assert len(swarm.asked) == asked
    await one.stop()
