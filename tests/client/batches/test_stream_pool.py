"""Streams that are kept open between requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.client.batches.hop_requests import IDLE_TIMEOUT_S, MAX_IDLE_STREAMS_PER_SERVER, StreamPool
from swarm.errors import PeerLost, PeerTimeout
from swarm.protocol import messages
from tests.client.fakes import run

INFO = messages.InfoRequest()
REPLY = (messages.InfoReply(0, 1, 0, 0, "1"), b"")


async def ask(stream: Any) -> Any:
    await stream.send(INFO)
    return await stream.receive()


def test_a_stream_is_used_again():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        for _ in range(5):
            await pool.exchange("server", ask)
        assert len(server.streams) == 1
        pool.close()
        await asyncio.sleep(0.1)
        assert server.open_streams == 0

    run(scenario)


def test_each_conversation_has_its_own_and_few_are_kept():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(MAX_IDLE_STREAMS_PER_SERVER + 4)))
        await asyncio.sleep(0.1)
        assert server.open_streams == MAX_IDLE_STREAMS_PER_SERVER
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(MAX_IDLE_STREAMS_PER_SERVER)))
        assert len(server.streams) == MAX_IDLE_STREAMS_PER_SERVER + 4

    run(scenario)


def test_what_nobody_uses_is_closed():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        await pool.exchange("server", ask)
        await asyncio.sleep(IDLE_TIMEOUT_S - 1)
        await pool.exchange("server", ask)
        await asyncio.sleep(IDLE_TIMEOUT_S - 1)
        assert server.open_streams == 1
        await asyncio.sleep(2)
        assert server.open_streams == 0
        assert not pool._idle

    run(scenario)


def test_a_stream_that_the_server_has_closed_meanwhile_is_no_loss():
    async def scenario(swarm):
        server = await swarm.add(REPLY, "hang up")
        pool = StreamPool(swarm.network)
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(3)))
        for stream in server.streams:
            stream.close()
        await asyncio.sleep(0.1)
        await pool.exchange("server", ask)
        assert len(server.streams) == 4  # the others were closed as well, and are not tried

    run(scenario)


@pytest.mark.parametrize("error", [PeerTimeout("it is slow"), ValueError("a mistake"), asyncio.CancelledError()])
def test_after_trouble_a_stream_is_not_used_again(error):
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)

        async def fail(stream: Any) -> None:
            await ask(stream)
            raise error

        for _ in range(2):  # over a new stream, and over one that was kept
            with pytest.raises(type(error)):
                await pool.exchange("server", fail)
            await asyncio.sleep(0.1)
            assert server.open_streams == 0
            await pool.exchange("server", ask)
        assert len(server.streams) == 3

    run(scenario)


def test_a_server_that_is_gone_is_tried_once_more():
    async def scenario(swarm):
        server = await swarm.add(REPLY, "hang up")
        pool = StreamPool(swarm.network)
        await pool.exchange("server", ask)
        server.answers = ("hang up",)
        with pytest.raises(PeerLost):
            await pool.exchange("server", ask)
        assert len(server.streams) == 2

    run(scenario)
