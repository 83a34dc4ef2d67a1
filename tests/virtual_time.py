"""A clock that jumps to whatever happens next, so that tests of delays are exact and take no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from swarm.common.outcome import result_or_error
from swarm.errors import ServerClosing
from swarm.server.compute.compute_thread import settle_future


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop would sleep until its next timer, it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: everybody waits and no timer is set")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which begins at 0. Nothing in it may wait for a socket or a process.

    What it would give to a thread is done at once.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        settle_future(done, result_or_error(func, *args))
        return done


def run(scenario: Callable[[], Awaitable[None]], limit: float = 3600.0) -> None:
    """Run a scenario on virtual time; `time.monotonic` and `time.perf_counter` show it too.

    Args:
        limit: virtual seconds that it may take.

    Whatever goes wrong in the background is raised as well.
    """
    loop = VirtualLoop()
    wrong: list[Any] = []
    loop.set_exception_handler(lambda _, context: wrong.append(context.get("exception") or context["message"]))

    async def whole() -> None:
        async with asyncio.timeout(limit):
            await scenario()

    with mock.patch.object(time, "monotonic", loop.time), mock.patch.object(time, "perf_counter", loop.time):
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(whole())
    assert not wrong, wrong


class InlineRuntime:
    """`swarm.server.compute.compute_thread.ComputeThread` that computes where it is called: no thread, nobody waits.

    Args:
        seconds: that each job seems to take.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.jobs = 0
        self._seconds = seconds
        self._closed = False

    async def run(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise ServerClosing("this server is leaving; use another one")
        self.jobs += 1
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return job(*args, **kwargs)

    def try_run_inline(self, job: Callable[[], None]) -> bool:
        return False  # where no time passes, no step is quick

    def post(self, job: Callable[[], None]) -> bool:
        if self._closed:
            return False
        self._posted = asyncio.get_running_loop().create_task(self.run(job))
        return True

    def close(self) -> None:
        self._closed = True
