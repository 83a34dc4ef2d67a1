"""What a session has remembered is freed when it ends, and what it lost on the way too: not only by the collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarm.data_structures import StepLayout
from tests import virtual_time
from tests.client.chains import TWICE, Conversation, Swarm
from tests.garbage import left_to_collector
from tests.slow import slow_except


async def talk_to_the_end(swarm: Swarm, disturb: Callable[[], object]) -> None:
    """A session from its opening to its end, in the middle of which something happens."""
    talk: Conversation = await swarm.chain()
    await talk.append(3, 5)
    for _ in range(5):
        await talk.append(1, 1)
    await talk.step(StepLayout((5, 3), (1, 1), (1, 0)))
    disturb()
    await talk.append(1, 1)
    await talk.append(1, 1)
    await talk.chain.close()
    del talk
    await asyncio.sleep(30)


def require_nothing_left(span_model: Any, disturb: Callable[[Swarm], object], push: bool = True) -> None:
    async def scenario() -> None:
        swarm = Swarm(span_model, TWICE, push=push)
        await swarm.start()
        await talk_to_the_end(swarm, lambda: None)
        with left_to_collector() as found:
            await talk_to_the_end(swarm, lambda: disturb(swarm))
            swarm.planner.failures.clear()
        assert {name: count for name, count in found.items() if name.startswith("swarm.client")} == {}
        assert not any("push" in name for name in found)

    virtual_time.run(scenario)


@pytest.mark.parametrize("push", slow_except([True, False], True))
def test_nothing_of_a_session_outlives_it(span_model, push):
    require_nothing_left(span_model, lambda swarm: None, push)


@pytest.mark.parametrize("push", slow_except([True, False], True))
@pytest.mark.parametrize("name", ["b"])
def test_nor_of_a_server_that_died(span_model, name, push):
    require_nothing_left(span_model, lambda swarm: swarm.kill(name), push)


@pytest.mark.parametrize("push", slow_except([True, False], True))
@pytest.mark.parametrize("name", ["b"])
def test_nor_of_one_that_hangs_and_those_that_are_asked_beside_it(span_model, name, push):
    require_nothing_left(span_model, lambda swarm: swarm.hub.hang(name), push)


@pytest.mark.parametrize("name", ["b"])
def test_nor_of_those_that_were_asked_in_vain(span_model, name):
    def slow_down(swarm: Swarm) -> None:
        """The server is late, and the others are later still."""
        swarm.servers[name].runtime._seconds = 0.6
        swarm.servers[name + "2"].runtime._seconds = 3.0

    require_nothing_left(span_model, slow_down)
