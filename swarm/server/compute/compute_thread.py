"""The one compute thread. Everything that touches torch runs here, one job after the other; the network loop never
waits for arithmetic and arithmetic never waits for the network. What is over sooner than it could be handed over may
take the thread's turn instead."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from swarm.errors import ServerClosing

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs jobs in order in its own thread.

    Attributes:
        thread: a daemon, so that a process that leaves does not wait for a job that never ends, such as loading.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()  # nothing may slip in behind the end of the queue, where it would never run
        self._turn = threading.Lock()
        self.thread = threading.Thread(target=self._work, name="swarm-compute", daemon=True)
        self.thread.start()

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The job's result, or its exception. Raises `ServerClosing` after `close`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result, error = job(*args, **kwargs), None
            except BaseException as raised:
                result, error = None, raised
            call_in_loop(loop, settle_future, future, result, error)

        if not self.post(work):
            raise ServerClosing("this server is leaving; use another one")
        return await future

    def post(self, job: Callable[[], None]) -> bool:
        """Run a job that tells nobody of its end and never raises. False after `close`. For any thread."""
        with self._closing:
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    def try_now(self, job: Callable[[], None]) -> bool:
        """Run a job that never raises in the calling thread, instead of the compute thread, if that has nothing to do.

        False, and nothing is run, if it has, and after `close`.
        """
        if self._closed or not self._jobs.empty() or not self._turn.acquire(blocking=False):
            return False
        try:
            job()
        finally:
            self._turn.release()
        return True

    def close(self) -> None:
        """Accept no more jobs; the thread ends after those it has."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._turn:
                job()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in another thread's loop, if that still runs."""
    with suppress(RuntimeError):  # it is closed, and nobody waits there
        loop.call_soon_threadsafe(function, *args)


def settle_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its result or its error, unless nobody waits for it any more."""
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # which a future cannot carry
        error = RuntimeError(f"a job raised {error!r}")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
