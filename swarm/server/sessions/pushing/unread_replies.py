"""Replies to steps that came on inside a server, on their way to clients that may not read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.server.sessions.unanswered_requests import UnansweredRequests

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 16 << 20
"""Bytes of the replies that wait for one client. If they hold more, the next one waits until it is alone."""

REPLY_BYTES = 1 << 10
"""What a reply takes beside its payload."""


class UnreadReplies:
    """Has replies sent while the steps behind them are computed.

    Those of one stream keep their order, because a stream sends one frame at a time. A stream that is not read is
    closed (see `ReplyStream`), which ends all replies that wait there.

    Args:
        unanswered: counts the replies that are not sent yet.
    """

    def __init__(self, unanswered: UnansweredRequests) -> None:
        self._unanswered = unanswered
        self._sizes: dict[str, dict[asyncio.Task[None], int]] = {}

    async def send(self, client: str, payload_bytes: int, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to send a reply to a client, as soon as there is room for it."""
        size = payload_bytes + REPLY_BYTES
        while (unread := self._sizes.get(client)) and sum(unread.values()) + size > MAX_UNREAD_BYTES:
            await asyncio.wait(unread, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.get_running_loop().create_task(send())
        self._sizes.setdefault(client, {})[task] = size
        self._unanswered.add()
        task.add_done_callback(lambda done: self._forget(client, done))

    def _forget(self, client: str, task: asyncio.Task[None]) -> None:
        """A reply was sent, or will never be."""
        self._unanswered.remove()
        del self._sizes[client][task]
        if not self._sizes[client]:
            del self._sizes[client]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("answering a step of …%s failed", client[-6:], exc_info=error)
