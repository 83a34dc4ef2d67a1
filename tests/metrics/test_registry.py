"""What every process tells of itself."""

from __future__ import annotations

import asyncio
import os
import platform

import psutil
import pytest

from swarm.common.version import VERSION
from swarm.metrics.registry import PERIOD_S, EventLoopMetrics, Registry, encode_metrics, new_registry
from tests import virtual_time
from tests.metrics.readings import Readings, parse, value


def test_a_process_tells_its_version_and_what_it_takes() -> None:
    body, content_type = encode_metrics(new_registry())
    readings = parse(body.decode())
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert value(readings, "swarm_build_info", version=VERSION, python=platform.python_version()) == 1
    resident = psutil.Process(os.getpid()).memory_info().rss
    told = value(readings, "process_resident_memory_bytes")
    assert told is not None
    assert resident / 2 < told < resident * 2


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
