"""Opening hops, and closing them again."""

from __future__ import annotations

import asyncio

from swarm.client.chain.hop_opening import close_all
from swarm.client.hops.hop_session import HopSession
from swarm.client.hops.input_history import InputHistory
from tests.client.fakes import OPENED, FakeSwarm, context, hop, run


def test_streams_are_closed_also_where_closing_is_canceled_before_it_has_begun():
    """A task that is canceled at once runs nothing of its coroutine, so that this cannot be left to it."""

    async def scenario(swarm: FakeSwarm) -> None:
        server = await swarm.add(OPENED)
        opened = HopSession(context(swarm), hop(), lambda *reply: None, lambda: None, InputHistory())
        await opened.open()
        assert server.open_streams == 1
        closing = asyncio.create_task(close_all([opened]))
        asyncio.get_running_loop().call_soon(closing.cancel)  # comes when the hops' own tasks are made, and not begun
        await asyncio.gather(closing, return_exceptions=True)
        assert closing.cancelled()
        await asyncio.sleep(1)
        assert not server.open_streams

    run(scenario)
