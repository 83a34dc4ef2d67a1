"""Peers that make a server allocate more than it has counted, beside one that works.

Each test is an attack that succeeds at commit a254ca2; what it did there stands in its first lines. Sizes are small:
what matters is how much is allocated for what was asked for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.data_structures import WireFormat
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_layout
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.protocol.framing import encode_prefix
from swarm.server.config import ServerConfig
from swarm.server.sessions import request_validation
from swarm.transport.p2p import Peer
from tests import zoo
from tests.bad_peers import run_peer
from tests.models.execution.storage_slots import CONTIGUOUS, Slots, count_storage
from tests.server.conversations import (
    FORWARD,
    HIDDEN,
    OPEN,
    SPAN,
    Server,
    bytes_of,
    changed,
    make_model,
    on_virtual_time,
    random,
    scenario,
)
from tests.swarms import run_client, run_swarm

LAYERS = SPAN.length


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SpanModel:
    """Blocks that keep keys and values in contiguous stores, as servers on CPUs do."""
    chosen = choose_layout(make_model(tmp_path_factory.mktemp("model")))
    assert chosen.strategy.layout == "contiguous"
    return chosen


@pytest.fixture
def slots(monkeypatch) -> Slots:
    return count_storage(LAYERS, CONTIGUOUS, monkeypatch)


def test_a_long_sequence_beside_many_short_ones(model, slots):
    """At a254ca2, these 600 tokens took 50,500 slots: as many for each of the short sequences as for the long one."""
    counts = [500, *[1] * 100]

    async def act(server: Server) -> None:
        client = await server.client()
        slots.begin()
        before = slots.most
        reply, _ = await client.ask(changed(FORWARD, counts=counts), encode_tensor(random(600), WireFormat.NONE))
        assert isinstance(reply, messages.ForwardReply), reply
        assert slots.most - before <= sum(counts)

    scenario(model, act, step_tokens=600)


def test_many_sequences_that_may_have_one_token_each(model, slots):
    """At a254ca2, 50 tokens were reserved and 3,200 slots allocated, 50 times the whole cache: 64 for each sequence."""

    async def act(server: Server) -> None:
        client = await server.client()
        slots.begin()
        before, free = slots.most, server.sessions.free
        await client.ask(changed(OPEN, max_length=1, sequences=50))
        step = messages.StepRequest(0, [0] * 50, [1] * 50, WireFormat.NONE, "float32")
        reply, _ = await client.ask(step, encode_tensor(random(50), WireFormat.NONE))
        assert isinstance(reply, messages.StepReply), reply
        assert slots.most - before <= free - server.sessions.free == 50
        await client.stream.send(messages.CloseSession())
        await server.until(lambda: len(server.sessions) == 1)

    scenario(model, act, step_tokens=50)


def test_a_sequence_that_grows_takes_what_was_reserved(model, slots):
    """At a254ca2, a session of up to 40 tokens had 64 slots from its first token on."""

    async def act(server: Server) -> None:
        client = await server.client()
        slots.begin()
        before = slots.most
        await client.begin(changed(OPEN, max_length=40))
        for _ in range(38):
            await client.right_step()
        assert slots.most - before <= 40 + 40 / LAYERS  # one block's storage exists twice while it grows

    scenario(model, act)


def test_sessions_that_are_closed_while_they_compute(model, slots):
    """At a254ca2, their cache was free for others at once, while their steps went on and kept it: 192 slots here."""

    async def act(server: Server) -> None:
        good = await (await server.client("good")).begin(changed(OPEN, session_id=b"a decent session"))
        slots.begin()
        before = slots.most
        for number in range(3):
            opening = changed(OPEN, session_id=bytes([number]) * 16, max_length=40)
            client, other = await server.client(), await server.client()
            await client.ask(opening)
            step = messages.StepRequest(0, [0], [40], WireFormat.NONE, "float32")
            await client.stream.send(step, encode_tensor(random(40), WireFormat.NONE))
            await asyncio.sleep(3)
            await other.ask(opening)
            await other.stream.send(messages.CloseSession())
            await server.until(lambda: len(server.sessions) == 1)
        await asyncio.sleep(3)
        assert slots.now // (2 * LAYERS) - before == 0
        await good.right_step()

    on_virtual_time(model, act, seconds=0.5, budget=1, step_tokens=40)


async def announce(stream: Any, size: int, sent: int = 0) -> None:
    """Begin a frame, and send no more of it than that."""
    header = messages.encode(messages.ProbeRequest(0))
    stream._writer.write(encode_prefix(len(header), size) + header + bytes(sent))
    await stream._writer.drain()


def test_frames_that_drip(model):
    """At a254ca2, frames of which a byte came now and then held their streams, and what they had sent, for ever."""

    async def act(server: Server) -> None:
        good = await (await server.client("good")).begin(changed(OPEN, session_id=b"a decent session"))
        clients = [await server.client() for _ in range(10)]
        for client in clients:
            await announce(client.stream, 1 << 20)
        for _ in range(300):
            for client in clients:
                with suppress(ConnectionError):
                    client.stream._writer.write(b"x")
            await asyncio.sleep(1)
        assert "hostile" not in server.handler._streams
        await good.right_step()

    on_virtual_time(model, act)


def test_identities_that_send_large_bodies_slowly(model):
    """At a254ca2 a body was not charged, and might come as slowly as its sender liked. Charged, and with a minimum rate
    of 4 KiB/s, three peers could hold all memory for requests for hours. Now whoever waits gets it.
    """
    size = 1 << 20

    async def act(server: Server) -> None:
        good = await (await server.client("good")).begin(changed(OPEN, session_id=b"a decent session"))
        for name in ("one", "other", "third"):
            for _ in range(2):
                await announce((await server.client(name)).stream, size, sent=size // 2)
        await asyncio.sleep(1)
        began, late = asyncio.get_running_loop().time(), await server.client("late")
        reply, _ = await late.ask(messages.ProbeRequest(0), bytes(size))
        assert isinstance(reply, messages.ProbeReply), reply
        assert asyncio.get_running_loop().time() - began < 40
        await good.right_step()

    on_virtual_time(model, act, memory=12 << 20)


@pytest.mark.parametrize("are_idle", [True, False], ids=["idle", "busy"])
def test_two_identities_that_fill_the_cache(model, are_idle):
    """At a254ca2, two peers that sent a token every 29 minutes kept all others out, and so did busy ones."""

    async def act(server: Server) -> None:
        server.sessions._now = asyncio.get_running_loop().time
        good = await (await server.client("good")).begin(changed(OPEN, session_id=b"a decent session"))
        hostile = []
        for name in ("one", "other"):
            for number in range(4):
                client = await server.client(name)
                await client.begin(changed(OPEN, session_id=bytes([number]) * 16))
                hostile.append(client)
        assert server.sessions.free < OPEN.max_length
        for _ in range(5):
            await asyncio.sleep(50)
            for client in (good, *hostile[: 0 if are_idle else None]):
                await client.right_step()
        late = await (await server.client("late")).begin(changed(OPEN, session_id=b"another session!"))
        refusal, _ = await hostile[0].hear()
        assert isinstance(refusal, messages.Refusal)
        assert refusal.code == "cache_reclaimed"
        await hostile[0].refused("unknown_session", hostile[0].next_step(), bytes_of(1))
        await late.right_step()
        await good.right_step()

    on_virtual_time(model, act, capacity=72, peer_share=0.75)


BODY_BYTES, BODIES = 8 << 20, 40
MEMORY_BYTES = 64 << 20
CONSTANT_BYTES = 48 << 20
"""What a server may take beside the memory that it accounts for: buffers of streams, and what an allocator keeps."""


@pytest.mark.slow
def test_many_large_frames_at_once(tmp_path_factory):
    """At a254ca2, each of 40 bodies of 8 MB was read whatever had come before, 320 MB in all: 68 GB at the limits."""
    folder = zoo.make_checkpoint("llama", tmp_path_factory.mktemp("model"))
    limits = {"request_memory": MEMORY_BYTES} if "request_memory" in {one.name for one in fields(ServerConfig)} else {}
    ids = torch.tensor([zoo.PROMPTS[0]])
    expected = AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=12, do_sample=False)
    with run_swarm(folder, [f"0:{zoo.BLOCKS}"], dtype="float32", **limits) as swarm, run_client(swarm) as model:
        (server,) = swarm.servers
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
        with run_peer(swarm) as (peer, background):
            before = resident = psutil.Process(server.pid).memory_info().rss
            sending = background.run(flood(peer, server.peer_id))
            deadline = time.monotonic() + FLOOD_S
            while time.monotonic() < deadline:
                resident = max(resident, psutil.Process(server.pid).memory_info().rss)
                time.sleep(0.05)
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
            assert resident - before <= MEMORY_BYTES + CONSTANT_BYTES
            assert len(sending) == BODIES


FLOOD_S = 15.0


async def flood(peer: Peer, server: str) -> list[asyncio.Task[None]]:
    """Begin to send all bodies at once, but for their last byte."""

    async def send_one() -> None:
        stream = await peer.open_stream(server)
        with suppress(OSError, RuntimeError):
            await announce(stream, BODY_BYTES, sent=BODY_BYTES - 1)
            await asyncio.Event().wait()

    return [asyncio.get_running_loop().create_task(send_one()) for _ in range(BODIES)]


STUCK_S = 60.0
EIGHT_BIT = WireFormat.BLOCKWISE8
FIRST_STEP = messages.StepRequest(0, [0], [2], EIGHT_BIT, "float32")


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        pytest.param((changed(OPEN, reply_format=EIGHT_BIT),), 0, id="opening"),
        pytest.param((OPEN, FIRST_STEP), 2, id="step"),
        pytest.param((changed(FORWARD, reply_format=EIGHT_BIT, counts=[2]),), 2, id="forward"),
    ],
)
def test_the_first_message_in_eight_bits(model, monkeypatch, asked, tokens):
    """At 8120ac5, it kept the compute thread for seconds, in which the steps of all others stood still: that is how
    long the library for the format takes to load, and a step did not even wait for it before it was queued."""
    loading, may_go_on = threading.Event(), threading.Event()

    def load_slowly(device: torch.device) -> None:
        loading.set()
        assert may_go_on.wait(STUCK_S), "nobody could compute"

    monkeypatch.setattr(request_validation, "load_quantizer", load_slowly)

    async def act(server: Server) -> None:
        other = await (await server.client("other")).begin(changed(OPEN, session_id=b"another session!"))
        client = await server.client()
        for message in asked[:-1]:
            await client.ask(message)
        wire = asked[-1].format if isinstance(asked[-1], messages.StepRequest) else WireFormat.NONE
        sent = encode_tensor(torch.zeros(tokens, HIDDEN), wire) if tokens else b""
        await client.stream.send(asked[-1], sent)
        await server.until(loading.is_set)
        await other.right_step()
        may_go_on.set()
        reply, _ = await client.hear()
        assert not isinstance(reply, messages.Refusal), reply

    try:
        scenario(model, act)
    finally:
        may_go_on.set()
