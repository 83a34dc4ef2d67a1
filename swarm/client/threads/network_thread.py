"""The thread of the network: an asyncio event loop that runs coroutines for synchronous callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from swarm.client.threads.compute_lock import current_ticket

T = TypeVar("T")

CLOSE_GRACE_S = 0.02
"""Seconds that pipes and sockets get to close before the event loop is closed."""


class NetworkThread:
    """A thread with an event loop; other threads run coroutines in it and wait for their results."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-network", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result or exception. Ctrl-C in the waiting thread cancels the coroutine.

        A thread that runs a lane lets other lanes compute while it waits.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        ticket = current_ticket()
        try:
            return future.result() if ticket is None else ticket.wait(future)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all coroutines and stop the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
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
