"""The one compute thread. Everything that touches torch runs here, one job after the other; the network loop never
waits for arithmetic and arithmetic never waits for the network."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from swarm.errors import ServerClosing
from swarm.server.queue_meter import QueueMeter

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[asyncio.Future[Any], asyncio.AbstractEventLoop, Callable[[], Any], float]


class Runtime:
    """Runs jobs in order in its own thread.

    The thread is a daemon: a process that leaves does not wait for a job that never ends, such as loading a model.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._meter = QueueMeter()
        threading.Thread(target=self._work, name="swarm-compute", daemon=True).start()

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The job's result, or its exception. Raises `ServerClosing` after `close`."""
        if self._closed:
            raise ServerClosing("this server is leaving; use another one")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((future, loop, lambda: job(*args, **kwargs), time.monotonic()))
        return await future

    @property
    def queue_seconds(self) -> float:
        """How long a job may expect to wait for the thread."""
        return self._meter.seconds(time.monotonic())

    def close(self) -> None:
        """Accept no more jobs; the thread ends after those it has."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, loop, work, came = job
            now = time.monotonic()
            self._meter.started(now - came, now)
            if future.cancelled():
                continue
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # which a future cannot carry
        error = RuntimeError(f"a job raised {error!r}")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
