"""Work that ends when its client disconnects."""

from __future__ import annotations

import asyncio

import pytest

from swarm.gateway.http.disconnect import ClientDisconnected, cancel_on_disconnect
from swarm.gateway.openai.api_errors import BadRequest
from tests.gateway.http.fake_client import Client, run


def test_work_ends_when_its_client_leaves():
    async def work() -> None:
        client, ended = Client(), asyncio.Event()

        async def long() -> None:
            try:
                client.left.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(ClientDisconnected):
            await cancel_on_disconnect(client.receive, long())
        assert ended.is_set()

    run(work)


def test_work_that_is_done_or_fails():
    async def work() -> None:
        async def fails() -> None:
            raise BadRequest("no")

        async def answers() -> int:
            return 7

        assert await cancel_on_disconnect(Client().receive, answers()) == 7
        with pytest.raises(BadRequest):
            await cancel_on_disconnect(Client().receive, fails())

    run(work)
