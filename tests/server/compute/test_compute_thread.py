from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.errors import ServerClosing
from swarm.server.compute.compute_thread import ComputeThread
from tests.async_tests import as_test

SOON = 60.0


def run(scenario) -> None:
    """Run `scenario(runtime)`; the runtime is closed at the end."""

    async def whole():
        runtime = ComputeThread()
        try:
            await asyncio.wait_for(scenario(runtime), SOON)
        finally:
            runtime.close()

    asyncio.run(whole())


thread_test = as_test(run, "runtime")


@thread_test()
async def test_jobs_run_one_after_the_other_in_order(runtime):
    log = []

    def job(number):
        log.append(("begin", number))
        log.append(("end", number))
        return number * 2

    assert await asyncio.gather(*(runtime.run(job, n) for n in range(50))) == [n * 2 for n in range(50)]
    assert log == [(what, n) for n in range(50) for what in ("begin", "end")]


class OutOfMemory(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), OutOfMemory(), StopIteration("end")], ids=repr)
@thread_test()
async def test_an_exception_comes_back_and_the_next_job_runs(runtime, error):
    def fail():
        raise error

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        await runtime.run(fail)
    # A future cannot carry StopIteration itself.
    assert caught.value is error or (type(error) is StopIteration and "StopIteration" in str(caught.value))
    assert await runtime.run(int, "7") == 7


@thread_test()
async def test_a_job_that_nobody_waits_for_any_more_is_not_begun(runtime):
    blocking, begun = threading.Event(), []
    first = asyncio.create_task(runtime.run(blocking.wait, SOON))
    unwanted = asyncio.create_task(runtime.run(begun.append, 1))
    await asyncio.sleep(0)
    unwanted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unwanted
    blocking.set()
    await first
    await runtime.run(int)  # behind the unwanted job in the queue
    assert begun == []


@thread_test()
async def test_close_finishes_what_was_begun_and_takes_nothing_new(runtime):
    before = set(threading.enumerate())
    other = ComputeThread()
    (thread,) = set(threading.enumerate()) - before
    go_on = threading.Event()
    jobs = [asyncio.create_task(other.run(go_on.wait, SOON)) for _ in range(3)]
    await asyncio.sleep(0)
    other.close()
    other.close()
    with pytest.raises(ServerClosing):
        await other.run(int)
    go_on.set()
    assert await asyncio.gather(*jobs) == [True] * 3
    await asyncio.to_thread(thread.join, SOON)
    assert not thread.is_alive()


def test_whatever_is_accepted_is_run_however_close_the_end_is():
    """Jobs come from other threads as well, while the loop closes the runtime."""
    for _ in range(50):
        runtime, begin = ComputeThread(), threading.Barrier(3)
        accepted, ran = [], []

        def post(runtime=runtime, begin=begin, accepted=accepted, ran=ran):
            begin.wait(SOON)
            while runtime.post(lambda: ran.append(1)):
                accepted.append(1)

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        begin.wait(SOON)
        runtime.close()
        assert not runtime.post(ran.clear)
        for thread in threads:
            thread.join(SOON)
        runtime.thread.join(SOON)
        assert not runtime.thread.is_alive()
        assert len(ran) == len(accepted)


@thread_test()
async def test_a_short_job_may_take_the_threads_turn_while_that_is_idle(runtime):
    assert await runtime.run(lambda: 1) == 1
    threads = []
    while not runtime.try_run_inline(lambda: threads.append(threading.get_ident())):
        await asyncio.sleep(0)  # the thread has told of its last job before it is through with it
    assert threads == [threading.get_ident()]
    assert await runtime.run(lambda: 2) == 2


@thread_test()
async def test_a_short_job_never_runs_beside_another(runtime):
    begun, go_on = threading.Event(), threading.Event()

    def job():
        begun.set()
        return go_on.wait(SOON)

    computing = asyncio.create_task(runtime.run(job))
    await asyncio.to_thread(begun.wait, SOON)
    assert not runtime.try_run_inline(pytest.fail)
    go_on.set()
    assert await computing


@thread_test()
async def test_what_is_posted_during_a_short_job_waits_for_its_end(runtime):
    log = []

    def job():
        assert runtime.post(lambda: log.append("posted"))
        log.append("short job")

    assert runtime.try_run_inline(job)
    await runtime.run(lambda: None)
    assert log == ["short job", "posted"]


def test_a_closed_runtime_runs_nothing_now():
    runtime = ComputeThread()
    runtime.close()
    assert not runtime.try_run_inline(pytest.fail)
