"""Ends work when the client that asked for it disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection, so no response is sent any more."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first.

    Raises:
        ClientDisconnected: the client disconnected before the work was done.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Wait until both have ended, so that the resources of the work are free.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
