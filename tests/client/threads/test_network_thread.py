from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.client.threads.network_thread import NetworkThread


@pytest.fixture
def background():
    loop = NetworkThread()
    yield loop
    loop.close()


def test_results_and_exceptions_come_back(background):
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError("negative")
        return 2 * value

    assert background.run(double(4)) == 8
    with pytest.raises(ValueError, match="negative"):
        background.run(double(-1))


def test_many_threads_may_wait_at_once(background):
    barrier = asyncio.Event()
    results = []

    async def wait() -> str:
        await barrier.wait()
        return "done"

    async def release() -> None:
        barrier.set()

    threads = [threading.Thread(target=lambda: results.append(background.run(wait()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    background.run(release())
    for thread in threads:
        thread.join()
    assert results == ["done"] * 3


def test_closing_cancels_what_runs_and_can_be_repeated():
    background = NetworkThread()
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    task = background.run(start())
    background.close()
    background.close()
    assert cancelled.is_set()
    assert task.cancelled()
