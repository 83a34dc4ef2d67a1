"""A session over real handlers while everything goes wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests import virtual_time
from tests.client.chains import Swarm

TWICE = {"a": (0, 2), "b": (2, 4), "c": (4, 6), "a2": (0, 2), "b2": (2, 4), "c2": (4, 6)}


def test_undisturbed(span_model):
    async def scenario():
        swarm = Swarm(span_model, TWICE)
        await swarm.start()
        talk = await swarm.chain()
        began = asyncio.get_running_loop().time()
        await talk.append(3, 5)
        for _ in range(5):
            await talk.append(1, 1)
        print(asyncio.get_running_loop().time() - began, swarm.planner.routes)
        await talk.chain.close()

    virtual_time.run(scenario)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_kill(span_model, name):
    async def scenario():
        swarm = Swarm(span_model, TWICE)
        await swarm.start()
        talk = await swarm.chain()
        await talk.append(3, 5)
        await talk.append(1, 1)
        swarm.kill(name)
        for _ in range(5):
            began = asyncio.get_running_loop().time()
            await talk.append(1, 1)
            print(asyncio.get_running_loop().time() - began, swarm.planner.routes, swarm.planner.failures)
        await talk.chain.close()

    virtual_time.run(scenario)
