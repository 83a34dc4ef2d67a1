"""The thread of the network: an asyncio event loop that runs coroutines for synchronous callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import uvloop

from swarm.client.threads.compute_lock import current_ticket
from swarm.errors import NotConnected

T = TypeVar("T")

CLOSE_GRACE_S = 0.02
"""Seconds that pipes and sockets get to close before the event loop is closed."""


class NetworkThread:
    """A thread with an event loop; other threads run coroutines in it and wait for their results."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-network", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self._closing = False

    @property
    def is_usable(self) -> bool:
        """Whether coroutines can run: it is not closed, and this process is the one that started it."""
        return not self._closing and os.getpid() == self._process

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result or exception. Ctrl-C in the waiting thread cancels the coroutine.

        A thread that runs a lane lets other lanes compute while it waits.

        Raises:
            NotConnected: it is closed, or was before the coroutine had ended, or this process was forked.
        """
        if not self.is_usable:
            work.close()
            self._refuse()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        ticket = current_ticket()
        try:
            return future.result() if ticket is None else ticket.wait(future)
        except BaseException as error:
            future.cancel()
            if self._closing and isinstance(error, Exception):
                self._refuse()
            raise

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine without waiting for it, if that is possible. It raises nothing."""
        if self.is_usable:
            with suppress(RuntimeError):  # closed meanwhile
                asyncio.run_coroutine_threadsafe(work, self._loop)
                return
        work.close()

    def _refuse(self) -> NoReturn:
        if os.getpid() != self._process:
            raise NotConnected(
                "this process was forked from the one that is connected to the swarm, and the thread of the connection "
                "is not in it. Load the model in this process; start processes with the method 'spawn' "
                "(multiprocessing.set_start_method('spawn')), because forking copies locks of other threads as well"
            )
        if not threading.main_thread().is_alive() and threading.current_thread().daemon:
            threading.Event().wait()  # the interpreter ends, and daemon threads with it
        raise NotConnected("the connection to the swarm is closed (model.swarm.close()); load the model again")

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run a last coroutine, cancel all others and stop the thread. In a forked process there is none."""
        if not self.is_usable:
            if last is not None:
                last.close()
            return
        self._closing = True
        for work in (last, _cancel_others()):
            if work is not None:
                asyncio.run_coroutine_threadsafe(work, self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    # The pipes of a daemon that has just ended close a moment later, which a closed loop could not do.
    await asyncio.sleep(CLOSE_GRACE_S)
