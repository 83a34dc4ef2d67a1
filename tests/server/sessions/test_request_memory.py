"""What requests are charged for before they are read, and what happens when there is no memory for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.errors import MemoryFull, TooLong
from swarm.metrics.server import ServerObserver
from swarm.models.execution import gradients
from swarm.protocol import messages
from swarm.server.limits import MIN_REQUEST_TOKENS, REQUEST_PEER_SHARE, min_request_bytes
from swarm.server.sessions import request_memory
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.request_memory import (
    ROOM_TIMEOUT_S,
    STREAM_BYTES,
    TRAINING_ROOM_TIMEOUT_S,
    RequestAccount,
)
from swarm.server.sessions.request_validation import RequestLimits
from tests import virtual_time
from tests.async_tests import as_test
from tests.server.conversations import ADAPTERS, FORWARD, HIDDEN, REVISION, SPAN, STEP, changed

virtual = as_test(virtual_time.run)

MEMORY = 4 << 20
SLOT_BYTES = 64
BACKWARD = messages.BackwardRequest(REVISION, SPAN.start, SPAN.end, [2, 1], WireFormat.NONE, "float32", WireFormat.NONE)


class Told(ServerObserver):
    def __init__(self) -> None:
        super().__init__()
        self.charged = self.capacity = self.refusals = 0

    def memory_totals(self, charged: int, capacity: int) -> None:
        self.charged, self.capacity = charged, capacity

    def memory_refused(self) -> None:
        self.refusals += 1


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def memory(model, told) -> RequestAccount:
    limits = RequestLimits(step_tokens=1000, backward_tokens=500, memory=MEMORY, slot_bytes=SLOT_BYTES)
    return RequestAccount(model, limits, AdapterStore(lambda: 0.0, ADAPTERS), told)


COUNTS = st.lists(st.integers(0, 400), min_size=1, max_size=20).filter(any)


@given(COUNTS)
def test_a_forward_is_charged_for_what_it_brings_computes_and_caches(model, counts):
    limits = RequestLimits(step_tokens=10_000, memory=MEMORY, slot_bytes=SLOT_BYTES)
    memory = RequestAccount(model, limits, AdapterStore(lambda: 0.0, ADAPTERS), ServerObserver())
    tokens = sum(counts)
    payload = tokens * HIDDEN * 4
    needs = memory.needs("peer", changed(FORWARD, counts=counts), payload)
    # The payload, inputs, outputs and reply, and keys and values of each token in three blocks.
    assert needs >= 4 * payload + tokens * SLOT_BYTES * SPAN.length


def test_a_request_that_will_be_refused_takes_its_payload(memory):
    absurd = [2**31 - 1] * 4096
    for message in (changed(FORWARD, counts=absurd), changed(BACKWARD, counts=absurd), changed(STEP, counts=absurd)):
        assert memory.needs("peer", message, 100) == 100


def test_the_least_memory_is_enough_for_what_clients_send_at_once(model):
    capacity = min_request_bytes(HIDDEN, model.dtype.itemsize)
    memory = RequestAccount(model, RequestLimits(memory=capacity), AdapterStore(lambda: 0.0), ServerObserver())
    for number in range(messages.MAX_PEER_SESSIONS):
        memory.open_stream(number, "peer")
    left = memory.pool.quota - memory.pool.held_by_peer("peer")
    replay = messages.ReplayRequest(0, [0], [MIN_REQUEST_TOKENS], WireFormat.NONE, "float32", None, True)
    for message in (changed(STEP, counts=[MIN_REQUEST_TOKENS]), replay):
        assert memory.needs("peer", message, MIN_REQUEST_TOKENS * HIDDEN * 4) <= left


def test_a_graph_is_charged_beyond_what_the_server_keeps_for_one(model, memory, monkeypatch):
    def graph(counts: list[int]) -> int:
        """What is charged for a graph that would not be if the server kept enough for it."""
        message = changed(BACKWARD, counts=counts)
        with monkeypatch.context() as patch:
            for module in (gradients, request_memory):
                patch.setattr(module, "MAX_GRAPH_BYTES", 0)
            charged = memory.needs("peer", message, 0)
        return charged - memory.needs("peer", message, 0)

    assert 0 < 10 * graph([10]) == graph([100])
    assert graph([10] * 40) == graph([10])  # one after the other


def header(message: Any) -> bytes:
    return messages.encode(message)


@virtual()
async def test_a_frame_waits_for_memory_and_is_refused_in_the_end(memory, told):
    loop = asyncio.get_running_loop()
    streams = [object() for _ in range(4)]
    first, second, third, other = (
        memory.open_stream(stream, peer) for stream, peer in zip(streams, ["a", "a", "a", "b"], strict=True)
    )
    size = 400_000
    for admission in (first, second):
        await admission.admit(header(messages.InfoRequest()), size)
    began = loop.time()
    with pytest.raises(MemoryFull, match="of memory for requests are needed"):
        await third.admit(header(messages.InfoRequest()), size)
    assert (loop.time() - began, told.refusals) == (ROOM_TIMEOUT_S, 1)
    await other.admit(header(messages.InfoRequest()), size)  # another peer has room meanwhile
    waiting = asyncio.create_task(third.admit(header(messages.InfoRequest()), size))
    await asyncio.sleep(1)
    first.release()
    await waiting
    assert loop.time() == began + ROOM_TIMEOUT_S + 1
    for admission in (second, third, other):
        admission.release()
    for stream in streams:
        memory.close_stream(stream)
    memory.report()
    assert told.charged == 0
    assert memory.pool.free == told.capacity == MEMORY


@pytest.mark.parametrize("message", [FORWARD, BACKWARD], ids=["forward", "backward"])
@virtual()
async def test_training_waits_until_a_slow_server_has_computed_what_came_before(memory, message):
    busy, waiting = (memory.open_stream(stream, "a") for stream in ("busy", "waiting"))
    size = int(0.4 * memory.pool.quota)
    await busy.admit(header(message), size)
    asking = asyncio.create_task(waiting.admit(header(message), size))
    await asyncio.sleep(TRAINING_ROOM_TIMEOUT_S - 1)
    assert not asking.done()
    busy.release()
    await asking
    waiting.release()


class Slow:
    """A peer that sends a frame which never ends."""

    def __init__(self, memory: RequestAccount, peer: str) -> None:
        self.interrupted: list[MemoryFull] = []
        self.admission = memory.open_stream(object(), peer, self.end)

    def end(self, error: MemoryFull) -> None:
        self.interrupted.append(error)
        self.admission.release()

    async def begin(self, size: int) -> None:
        await self.admission.admit(header(messages.InfoRequest()), size)


BODY = 600_000
"""There is room for three such bodies, each of which takes twice as much, and one peer may have one."""


@virtual()
async def test_bodies_that_come_slowly_give_way_to_a_request_that_waits(memory, told):
    loop = asyncio.get_running_loop()
    slow = [Slow(memory, peer) for peer in "abc"]
    for one in slow:
        await one.begin(BODY)
    await asyncio.sleep(500)
    assert not any(one.interrupted for one in slow)  # nobody waits
    began = loop.time()
    late = Slow(memory, "d")
    await late.begin(BODY)
    assert loop.time() == began
    assert all("too slowly" in str(one.interrupted[0]) for one in slow)
    assert (late.interrupted, told.refusals) == ([], 3)


@virtual()
async def test_a_peer_does_not_push_out_its_own_bodies_nor_those_of_peers_that_hold_less(memory):
    slow = [Slow(memory, "a"), Slow(memory, "b")]
    await slow[0].begin(BODY)
    await slow[1].begin(BODY // 4)
    with pytest.raises(MemoryFull):
        await Slow(memory, "a").begin(BODY)
    assert not slow[0].interrupted
    assert not slow[1].interrupted


@virtual()
async def test_a_stream_need_not_wait_behind_frames_that_do(memory):
    """Frames of its own peer, for which there is not enough memory, and others that wait before it."""
    holders = [memory.open_stream(number, peer) for number, peer in enumerate("abac")]
    for admission in holders[:2]:
        await admission.admit(header(messages.InfoRequest()), int(0.35 * memory.pool.quota))
    waiting = [asyncio.create_task(one.admit(header(messages.InfoRequest()), 600_000)) for one in holders[2:]]
    await asyncio.sleep(1)
    assert not any(one.done() for one in waiting)
    for peer in "abcd":
        memory.open_stream(peer, peer)
    for admission in holders:
        admission.release()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_a_step_that_copies_fits_beside_the_other_streams_of_its_peer(model):
    memory = RequestAccount(
        model, RequestLimits(memory=MEMORY, slot_bytes=1 << 16), AdapterStore(lambda: 0.0), ServerObserver()
    )
    beams = changed(STEP, starts=[100] * 8, counts=[1] * 8, sources=[0] * 8)

    async def scenario() -> None:
        admissions = [memory.open_stream(number, "a") for number in range(8)]
        began = asyncio.get_running_loop().time()
        await admissions[0].admit(header(beams), 8 * HIDDEN * 4)
        assert asyncio.get_running_loop().time() == began
        assert memory.pool.held_by_peer("a") == 8 * STREAM_BYTES + memory.pool.quota // 2

    virtual_time.run(scenario)


@virtual()
async def test_a_frame_that_can_never_fit_is_refused_at_once(memory):
    admission = memory.open_stream("stream", "a")
    with pytest.raises(TooLong, match="send fewer tokens at once"):
        await admission.admit(header(messages.InfoRequest()), int(MEMORY * REQUEST_PEER_SHARE))
    admission.release()
    assert memory.pool.held_by_peer("a") == STREAM_BYTES


@pytest.mark.parametrize("message", [FORWARD, BACKWARD], ids=["forward", "backward"])
@virtual()
async def test_training_that_can_never_fit_here_may_fit_elsewhere(memory, message):
    """Clients ask no other server after `TooLong`, which every one would answer with."""
    admission = memory.open_stream("stream", "a")
    with pytest.raises(MemoryFull, match="ask another server"):
        await admission.admit(header(message), int(MEMORY * REQUEST_PEER_SHARE))


def test_streams_are_charged_too(memory, told):
    count = int(MEMORY * REQUEST_PEER_SHARE) // STREAM_BYTES
    for number in range(count):
        memory.open_stream(number, "a")
    with pytest.raises(MemoryFull):
        memory.open_stream(count, "a")
    assert told.refusals == 1
    memory.open_stream("another one's", "b")
    memory.report()
    assert told.charged == (count + 1) * STREAM_BYTES
