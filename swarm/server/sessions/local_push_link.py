"""Handing a step's outputs on to another session at this server, on the blocks behind.

A client may cut the span of one server into parts, each with a session of its own (see `EarlyExit.boundaries`). What
one part has computed goes to the next in memory. Otherwise it is a push like those between servers: it is validated in
the same way, may be lost, and its reply goes to the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.server.compute.compute_request import Bytes
from swarm.server.sessions.step_merging import mergeable
from swarm.server.sessions.unanswered_requests import UnansweredRequests

logger = logging.getLogger(__name__)

MAX_WAITING_STEPS = 64
"""Steps that a link holds. A client has fewer of one session under way."""

MAX_WAITING_BYTES = 16 << 20
"""Bytes that a link holds, unless it is a single step."""

Push = tuple[messages.PushRequest, Bytes]
"""A step for another session, and its payload."""


class LocalPushLink:
    """The link from one session of this server to another one of the same client.

    Pushing only puts a step into a queue. A task of the link's own takes it out, so that the session that pushes never
    waits for the other one. The task takes all steps at once that can be computed as one: those that came while the one
    before was computed, or had to let others go first.

    Args:
        client: peer id of both sessions' client.
        session_id: the session on the blocks behind.
        deliver: computes and answers steps that can be computed as one. Raises `RemoteError` if this server may not
            push into that session.
        unanswered: counts the steps that the link holds.

    Attributes:
        reply_delay_s: the client's copy need not wait, because it delays no push.
    """

    reply_delay_s = 0.0

    def __init__(
        self,
        client: str,
        session_id: bytes,
        deliver: Callable[[Sequence[Push]], Awaitable[None]],
        unanswered: UnansweredRequests,
    ) -> None:
        self._client = client
        self._session_id = session_id
        self._deliver = deliver
        self._unanswered = unanswered
        self._waiting: deque[Push] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def push(self, step: messages.StepRequest, payload: Bytes) -> bool:
        """Queue a step for the other session. False if there is no room; the client has to deliver it then."""
        waiting_bytes = sum(len(waiting) for _, waiting in self._waiting)
        is_full = len(self._waiting) >= MAX_WAITING_STEPS or waiting_bytes + len(payload) > MAX_WAITING_BYTES
        if self._closed or (self._waiting and is_full):
            return False
        request = messages.PushRequest(self._client, self._session_id, step)
        self._waiting.append((request, bytes(payload)))  # the memory of a tensor has no hash
        self._unanswered.add()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._deliver_waiting())
        return True

    def close(self) -> None:
        """Take no more steps and drop those that wait. Those that are being computed are answered."""
        self._closed = True
        self._unanswered.remove(len(self._waiting))
        self._waiting.clear()

    async def _deliver_waiting(self) -> None:
        try:
            while self._waiting:
                count = mergeable([push.step for push, _ in self._waiting])
                together = [self._waiting.popleft() for _ in range(count)]
                try:
                    await self._deliver(together)
                finally:
                    self._unanswered.remove(count)
        except RemoteError as error:
            logger.debug("a session of …%s cannot be pushed into: %s", self._client[-6:], error)
            self.close()
        finally:
            self._task = None
            if self._waiting:  # a fault of this server
                self.close()
