"""Clients that want more than there is: refusals or back-pressure for them, and nothing of it for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.server.sessions.push_link import MIN_BYTES_PER_S, PUSH_TIMEOUT_S
from swarm.server.sessions.request_validation import RequestLimits
from swarm.server.sessions.session_table import RECONNECT_TIMEOUT_S
from tests import memory_hub
from tests.server.conversations import (
    OPEN,
    STEP,
    Client,
    Server,
    beside_good_client,
    bytes_of,
    changed,
    in_virtual_time,
    random,
)

HOSTILE = "hostile"


def now() -> float:
    return asyncio.get_running_loop().time()


def numbered(number: int, **changes: Any) -> messages.OpenSession:
    """An opening of a session of its own."""
    return changed(OPEN, session_id=number.to_bytes(16, "big"), **changes)


@asynccontextmanager
async def besides(server: Server) -> AsyncIterator[Client]:
    """Another client, which works and goes on working."""
    good = await (await server.client("good")).begin(changed(OPEN, session_id=b"a decent session"))
    yield good
    await good.right_step()
    await good.right_step(2)


@beside_good_client(capacity=2048, peer_share=0.75)
async def test_a_thousand_sessions_at_once(server):
    """Each on a stream of its own, all of them open."""
    streams, opened, refusals = [], 0, set()
    for number in range(1000):
        client = await server.client()
        streams.append(client.stream)
        await client.stream.send(numbered(number))
        reply, _ = await client.hear()
        opened += isinstance(reply, messages.SessionOpened)
        if isinstance(reply, messages.Refusal):
            refusals.add(reply.code)
    assert opened == min(RequestLimits().streams, messages.MAX_PEER_SESSIONS, 2048 * 3 // 4 // 8)
    assert refusals == {"cache_full"}  # the server is well: whoever asks has too much of it
    assert len(server.sessions) == opened + 1
    assert sum(map(len, server.handler._streams.values())) <= RequestLimits().streams + 1
    other = await (await server.client("a third one")).begin()
    for stream in streams:
        stream.close()
    await server.until(lambda: HOSTILE not in server.handler._streams)
    server.now += RECONNECT_TIMEOUT_S + 1
    server.sessions.expire()
    assert (len(server.sessions), server.sessions.free) == (2, 2048 - 2 * 8)
    await other.right_step()
    await (await server.client()).begin()


@pytest.fixture
def small_window(monkeypatch) -> int:
    """Bytes that a client which reads nothing may be owed before whoever writes has to wait."""
    monkeypatch.setattr(memory_hub, "MAX_UNREAD_BYTES", 1000)
    return 1000


def owed(server: Server, client: str = HOSTILE) -> int:
    """Bytes that wait in the server's buffers for a client."""
    return sum(
        len(data or b"") for pipe in server.hub._pipes if pipe.between == ("server", client) for data in pipe._in_flight
    )


FRAME = 3000
"""A bit more than a step's answer with 16 tokens takes."""

DEADLINE = PUSH_TIMEOUT_S + FRAME / MIN_BYTES_PER_S


async def ask_on(client: Client, steps: int, tokens: int = 16) -> None:
    """Ask for steps without waiting for answers: each overwrites the one before."""
    for number in range(steps):
        step = changed(STEP, step=client.steps + number, starts=[0], counts=[tokens])
        await client.stream.send(step, encode_tensor(random(tokens, number), WireFormat.NONE))


@in_virtual_time()
async def test_a_client_that_reads_no_answers(server, small_window):
    server.sessions._now = asyncio.get_running_loop().time
    async with besides(server) as good:
        client = await server.client()
        await client.ask(changed(OPEN, max_length=16))
        session = server.session()
        await ask_on(client, 100)
        server.hub.hang(HOSTILE)
        begun = session.next_step
        for _ in range(3):
            await good.right_step()
            await asyncio.sleep(0.1)
        assert session.next_step <= begun + 2 < 100  # its stream stands still
        assert 0 < owed(server) <= small_window + FRAME
        assert session.attached == 1
        await asyncio.sleep(DEADLINE)
        assert (session.attached, session.client) == (0, None)
        assert HOSTILE not in server.handler._streams
        await server.handler.idle()
        await asyncio.sleep(RECONNECT_TIMEOUT_S + 1)
        server.sessions.expire()
        assert len(server.sessions) == 1


@in_virtual_time()
async def test_a_client_that_reads_no_answers_to_pushed_steps(server, small_window):
    """However many streams push, one frame at a time waits for the client; the streams stand still, then go on."""
    server.sessions._now = asyncio.get_running_loop().time
    async with besides(server):
        client = await server.client()
        await client.ask(changed(OPEN, max_length=16))
        await client.stream.send(messages.SetNeighbors("before", None, None))
        await client.ask(messages.InfoRequest())
        session = server.session()
        server.hub.hang(HOSTILE)
        pushers = [await server.client("before") for _ in range(20)]
        for number, pusher in enumerate(pushers):
            step = changed(STEP, step=number, starts=[0], counts=[16])
            request = messages.PushRequest(HOSTILE, OPEN.session_id, step)
            await pusher.stream.send(request, bytes_of(16))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert session.client is not None
        assert 0 < owed(server) <= small_window + FRAME
        await asyncio.sleep(DEADLINE)
        # All were computed, and the client may come back for the last answer.
        assert (session.next_step, session.attached, session.client) == (20, 0, None)
        assert HOSTILE not in server.handler._streams
        await server.handler.idle()
        server.hub.resume(HOSTILE)
        again = await server.client()
        assert await again.ask(changed(OPEN, max_length=16)) == (messages.SessionOpened(20), b"")
        await pushers[0].ask(messages.InfoRequest())


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["it waits for its answer", "it sends"])
@in_virtual_time()
async def test_a_server_can_leave_whoever_does_not_read(server, small_window, seconds):
    client = await server.client()
    await client.ask(changed(OPEN, max_length=16))
    await ask_on(client, 10)
    server.hub.hang(HOSTILE)
    await asyncio.sleep(seconds)
    began = now()
    server.handler.closing = True
    await server.handler.hand_over()
    assert now() - began <= 1.0 + 1e-6
    server.handler.hang_up()
    await asyncio.sleep(DEADLINE)
    assert not server.hub.tasks  # nothing holds the blocks any more
    await server.handler.idle()


@in_virtual_time()
async def test_hanging_up_ends_streams_that_nobody_uses(server):
    """Also where closing a stream does not wake its reader, because something is still unsent."""
    client = await (await server.client()).begin()

    class Stuck:
        peer_id = "stuck"
        closed = False

        async def send(self, message, payload=b"", timeout_s=None):
            pass

        async def receive(self, limit=0, admit=None):
            await asyncio.Event().wait()

        def close(self):
            self.closed = True

    stuck: Any = Stuck()
    serving = asyncio.create_task(server.handler(stuck))
    await asyncio.sleep(1)
    server.handler.hang_up()
    await asyncio.wait([serving], timeout=1)
    assert serving.cancelled()
    assert stuck.closed
    await client.is_over()
    assert not server.handler._streams
