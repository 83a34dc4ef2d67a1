"""The one compute thread. Everything that touches torch runs here, one job after the other.

The network loop never waits for arithmetic, and arithmetic never waits for the network. A job that takes less time than
handing it over may run in the calling thread instead, while the compute thread is idle.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from swarm.common.outcome import result_or_error
from swarm.errors import ServerClosing

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs jobs in order in a thread of its own.

    Attributes:
        thread: a daemon thread, so that a process that exits does not wait for a long job such as loading. A process
            that just exits while it computes is aborted: Python ends daemon threads where they next need it, and
            torch's C++ does not survive that. So whatever makes one waits for it to end, and if it does not, leaves by
            `os._exit`.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._posting = threading.Lock()  # no job may be queued behind the end marker, where it would never run
        self._computing = threading.Lock()
        self.thread = threading.Thread(target=self._work, name="swarm-compute", daemon=True)
        self.thread.start()

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job in the thread and return its result. Raises what it raises, or `ServerClosing` after `close`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            if future.cancelled():
                return
            call_in_loop(loop, settle_future, future, result_or_error(job, *args, **kwargs))

        if not self.post(work):
            raise ServerClosing("this server is leaving; use another one")
        return await future

    def post(self, job: Callable[[], None]) -> bool:
        """Queue a job that returns nothing and never raises. False after `close`. May be called from any thread."""
        with self._posting:
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    def try_run_inline(self, job: Callable[[], None]) -> bool:
        """Run a job that never raises in the calling thread, if the compute thread is idle.

        Returns False without running it if the compute thread is busy, and after `close`.
        """
        if self._closed or not self._jobs.empty() or not self._computing.acquire(blocking=False):
            return False
        try:
            job()
        finally:
            self._computing.release()
        return True

    def close(self) -> None:
        """Accept no more jobs. The thread ends after the jobs that are queued."""
        with self._posting:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    async def wait_ended(self, timeout_s: float) -> bool:
        """After `close`, wait until the thread has ended, for `timeout_s` at most. False if it still computes."""
        await asyncio.to_thread(self.thread.join, timeout_s)
        return not self.thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._computing:
                job()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in the loop of another thread, if that loop still runs."""
    with suppress(RuntimeError):  # the loop is closed, so nothing waits for the result
        loop.call_soon_threadsafe(function, *args)


def settle_future(future: asyncio.Future[Any], outcome: Any) -> None:
    """Give a future its result or, if `outcome` is an exception, its error, unless it is settled."""
    if future.done():
        return
    if isinstance(outcome, StopIteration):  # a future cannot carry it
        outcome = RuntimeError(f"a job raised {outcome!r}")
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
