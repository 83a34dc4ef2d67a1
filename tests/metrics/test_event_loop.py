"""What a process tells of its event loop."""

from __future__ import annotations

import asyncio

import pytest

from swarm.metrics.event_loop import PERIOD_S, EventLoopMetrics
from swarm.metrics.registry import Registry, encode_metrics
from tests import virtual_time
from tests.metrics.readings import Readings, parse, value


def read(registry: Registry) -> Readings:
    return parse(encode_metrics(registry)[0].decode())


def test_what_blocks_the_loop_is_its_lag() -> None:
    async def scenario() -> None:
        registry, loop = Registry(), asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualLoop)
        task = loop.create_task(EventLoopMetrics(registry).run())
        await asyncio.sleep(10.5 * PERIOD_S)
        before = read(registry)
        assert value(before, "swarm_loop_lag_seconds_count") == 10
        assert value(before, "swarm_loop_lag_seconds_sum") == pytest.approx(0)
        loop._jumping.now += 3.0
        await asyncio.sleep(PERIOD_S / 4)
        task.cancel()
        after = read(registry)
        assert value(after, "swarm_loop_lag_seconds_bucket", le="2.0") == 10
        assert value(after, "swarm_loop_lag_seconds_count") == 11
        assert value(after, "swarm_loop_lag_seconds_sum") == pytest.approx(3.0 - PERIOD_S / 2)

    virtual_time.run(scenario)


def test_tasks_are_counted() -> None:
    async def scenario() -> None:
        registry = Registry()
        tasks = [asyncio.create_task(EventLoopMetrics(registry).run())]
        tasks += [asyncio.create_task(asyncio.sleep(100)) for _ in range(5)]
        await asyncio.sleep(2 * PERIOD_S)
        assert value(read(registry), "swarm_loop_tasks") == len(tasks) + 1
        for task in tasks:
            task.cancel()

    virtual_time.run(scenario)
