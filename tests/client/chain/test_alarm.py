"""A timer that can be moved."""

from __future__ import annotations

import asyncio
import math
import time

from swarm.client.chain.late import Alarm
from tests import virtual_time


def rings(*changes) -> list[float]:
    """When an alarm rings that is started for 2 s from now, after some changes, each with its time."""
    times: list[float] = []

    async def scenario():
        began, alarm = time.perf_counter(), Alarm()
        alarm.start(began + 2, lambda: times.append(round(time.perf_counter() - began, 3)))
        for at, change in changes:
            await asyncio.sleep(began + at - time.perf_counter())
            change(alarm, began)
        await asyncio.sleep(100)

    virtual_time.run(scenario)
    return times


def move(to: float):
    return lambda alarm, began: alarm.move(began + to)


def stop(alarm: Alarm, began: float) -> None:
    alarm.stop()


def test_it_rings_once_at_the_time_that_was_named_last():
    assert rings() == [2]
    assert rings((1, move(5))) == [5]
    assert rings((1, move(1.5))) == [1.5]
    assert rings((1, move(5)), (4, move(9))) == [9]


def test_an_infinite_time_never_comes():
    assert rings((1, move(math.inf))) == []
    assert rings((1, move(math.inf)), (4, move(9))) == [9]


def test_it_does_not_ring_once_it_is_stopped():
    assert rings((1, stop)) == []
    assert rings((1, stop), (1, move(5))) == []
