"""Bodies that are bounded in size, time and memory."""

from __future__ import annotations

import asyncio

import pytest

from swarm.gateway.http.disconnect import ClientDisconnected
from swarm.gateway.http.request_body import BodyMemory
from swarm.gateway.openai.api_errors import PayloadTooLarge, RequestTimeout, ServiceUnavailable
from tests.gateway.http.fake_client import Client, run


def test_a_body_is_read():
    async def work() -> None:
        assert await Client([b"ab", b"cd"]).read() == b"abcd"

    run(work)


@pytest.mark.parametrize("headers", [[], [("content-length", "11")], [("content-length", "9" * 400)]])
def test_a_body_that_is_too_large(headers):
    async def work() -> None:
        with pytest.raises(PayloadTooLarge, match="larger than 10 bytes"):
            await Client([b"123456", b"78901"], headers=headers).read()

    run(work)


def test_a_body_that_does_not_arrive():
    async def work() -> None:
        with pytest.raises(RequestTimeout, match="did not arrive within 0 s"):
            await Client().read(seconds=0.01)

    run(work)


def test_a_client_that_disconnects_before_its_body_is_complete():
    async def work() -> None:
        with pytest.raises(ClientDisconnected):
            await Client([b"a"], leaves=True).read()

    run(work)


def test_all_bodies_together_have_limited_memory():
    async def work() -> None:
        room = BodyMemory(10)
        first = asyncio.create_task(Client([b"1234567"], leaves=True).read(room=room))
        with pytest.raises(ClientDisconnected):
            await first
        for _ in range(3):  # whatever became of a body, its room is free again
            assert await Client([b"12345", b"67890"]).read(room=room) == b"1234567890"
            with pytest.raises(ServiceUnavailable, match="too many large requests at once"):
                await Client([b"123456", b"78901"]).read(limit=20, room=room)

    run(work)
