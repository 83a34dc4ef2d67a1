"""The bridge from a person's ordinary Python to the network: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from swarm.client.threads.compute_lock import current_ticket

T = TypeVar("T")

CLOSE_GRACE_S = 0.02
"""Seconds that a loop gets to close what has ended, before it is closed itself."""


class NetworkThread:
    """Runs coroutines for threads that wait for their results."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-network", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result or exception. Ctrl-C in the waiting thread cancels it.

        A thread that is one lane of several lets the others compute meanwhile.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        turn = current_ticket()
        try:
            return future.result() if turn is None else turn.wait(future)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop. Coroutines that are still running are cancelled."""
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
    # The pipes of a daemon that has just ended close a moment later; once the loop is closed they could not any more.
    await asyncio.sleep(CLOSE_GRACE_S)
