"""What hivemind keeps of the calls over its one connection to the libp2p daemon, without two ways to break it.

- One task reads all answers and gives each to its call. If the call has been given up in this very moment (its future
  is cancelled, and its caller has not run yet), hivemind 1.1.12 raises `InvalidStateError` in that task, which ends:
  every later call of this peer hangs, and it answers no more requests. A peer that answers just when its caller's time
  is up can bring that about.
- A request whose sender has gone before it was answered is never forgotten, with everything that it held.

Both lie in `ControlClient`: `_read_from_persistent_conn` and `_handle_persistent_request`.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID


class PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """The calls that wait for an answer. One that has ended is not among them, even if its caller does not know yet."""

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


class RunningRequests(dict[UUID, "asyncio.Task[None]"]):
    """The requests of others that are being answered. One that has ended is forgotten, however it did."""

    def __setitem__(self, call_id: UUID, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


def mend_calls(control: Any) -> None:
    """Let hivemind's `ControlClient` keep its calls in these. For one that has no calls yet."""
    control._pending_calls = PendingCalls()
    control._handler_tasks = RunningRequests()
