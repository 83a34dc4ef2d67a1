"""The clock that other tests rest on."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests import virtual_time


def test_hours_pass_at_once_and_to_the_microsecond():
    async def scenario():
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(asyncio.sleep(1000), asyncio.sleep(2000))
        assert loop.time() - began == pytest.approx(2000, abs=1e-6)
        assert time.monotonic() == time.perf_counter() == loop.time()

    real = time.monotonic()
    virtual_time.run(scenario)
    assert time.monotonic() - real < 60  # the real clock is back


def test_a_deadlock_is_an_error_and_not_a_hang():
    async def scenario():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        virtual_time.run(scenario, limit=10)

    async def without_a_timer():
        await asyncio.Event().wait()

    loop = virtual_time.VirtualLoop()
    task = loop.create_task(without_a_timer())
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.wait({task}))
    loop.close()


def test_an_error_in_the_background_is_not_lost():
    async def scenario():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        virtual_time.run(scenario)
