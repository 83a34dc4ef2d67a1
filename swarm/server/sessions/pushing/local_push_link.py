"""Handing a step's outputs on to another session at this server, on the blocks behind.

A client may cut the span of one server into parts, each with a session of its own (see `EarlyExit.boundaries`). What
one part has computed goes to the next in memory. Otherwise it is a push like those between servers: it is validated in
the same way, may be lost, and its reply goes to the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.server.compute.compute_request import Bytes
from swarm.server.sessions.pushing.step_merging import mergeable
from swarm.server.sessions.unanswered_requests import UnansweredRequests

logger = logging.getLogger(__name__)

MAX_WAITING_STEPS = 64
"""Steps that a link holds. A client has fewer of one session under way."""

MAX_WAITING_BYTES = 16 << 20
"""Bytes that all links of a client hold. A link that holds nothing takes a step of any size, for which the session has
reserved memory (see `SessionTable`); otherwise links that wait for each other would wait for ever."""

ROOM_TIMEOUT_S = 30.0
"""How long a step may wait for room in a link. Those before it are being computed meanwhile."""

MAX_HOLD_S = 1.0
"""How long steps are held after the newest of them, if their client says nothing. It is the client that loses by it."""

Push = tuple[messages.PushRequest, Bytes]
"""A step for another session, and its payload."""


class LocalPushLink:
    """The link from one session of this server to another one of the same client.

    Pushing only puts a step into a queue. A task of the link's own takes it out, so that the session that pushes never
    waits for the other one. The task takes all steps at once that can be computed as one: those that came while the one
    before was computed, or had to let others go first. Steps for which no client waits are held back for others.

    Args:
        client: peer id of both sessions' client.
        peer_id: this server.
        session_id: the session on the blocks behind.
        deliver: computes and answers steps that can be computed as one. Raises `RemoteError` if this server may not
            push into that session.
        may_hold: whether steps that wait can wait for others, to be computed with them as one.
        unanswered: counts the steps that the link holds.
        waiting_bytes: for each client, bytes that its links hold.

    Attributes:
        reply_delay_s: the client's copy need not wait, because it delays no push.
    """

    reply_delay_s = 0.0

    def __init__(
        self,
        client: str,
        peer_id: str,
        session_id: bytes,
        deliver: Callable[[Sequence[Push]], Awaitable[None]],
        may_hold: Callable[[Sequence[messages.StepRequest]], bool],
        unanswered: UnansweredRequests,
        waiting_bytes: Counter[str],
    ) -> None:
        self._client = client
        self._peer_id = peer_id
        self._session_id = session_id
        self._deliver = deliver
        self._may_hold = may_hold
        self._unanswered = unanswered
        self._waiting_bytes = waiting_bytes
        self._waiting: deque[Push] = deque()
        self._left = asyncio.Event()
        self._entering = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._hold_end: asyncio.TimerHandle | None = None
        self._closed = False

    def leads_to(self, peer_id: str, session_id: bytes) -> bool:
        """Whether it leads to this session at this server, and works."""
        return not self._closed and (peer_id, session_id) == (self._peer_id, self._session_id)

    async def push(self, step: messages.StepRequest, payload: Bytes) -> bool:
        """Queue a step for the other session, as soon as there is room. False if there is none for a long time.

        The session that pushes computes no further step meanwhile. If the client had to deliver this step instead, it
        would come before those that wait, and be refused.
        """
        async with self._entering:  # steps keep their order
            if not self._has_room(payload):
                await self._wait_for_room(payload)
        if self._closed:
            return False
        request = messages.PushRequest(self._client, self._session_id, step)
        self._waiting.append((request, bytes(payload)))  # the memory of a tensor has no hash
        self._unanswered.add()
        self._waiting_bytes[self._client] += len(payload)
        self.deliver_due()
        return True

    def deliver_due(self) -> None:
        """Hand the steps over that wait, unless they are to be held."""
        if self._hold_end is not None:
            self._hold_end.cancel()
            self._hold_end = None
        if not self._holds():
            self._deliver_all()
        elif self._waiting:
            self._hold_end = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._deliver_all)

    def hold_no_more(self) -> None:
        """Another link leads to the same session now, and is told which steps are urgent."""
        self._may_hold = lambda steps: False
        self.deliver_due()

    def close(self) -> None:
        """Take no more steps and drop those that wait. Those that are being computed are answered."""
        self._closed = True
        if self._hold_end is not None:
            self._hold_end.cancel()
        self._unanswered.remove(len(self._remove(len(self._waiting))))

    async def _wait_for_room(self, payload: Bytes) -> None:
        """Return once there is room, or the link is closed: by this, if that takes long."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                while not self._closed and not self._has_room(payload):
                    self._deliver_all()
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            logger.warning("a session of …%s takes no steps any more: its link is closed", self._client[-6:])
            self.close()

    def _has_room(self, payload: Bytes) -> bool:
        waiting_bytes = self._waiting_bytes[self._client] + len(payload)
        is_full = len(self._waiting) >= MAX_WAITING_STEPS or waiting_bytes > MAX_WAITING_BYTES
        return not (self._waiting and is_full)

    def _remove(self, count: int) -> list[Push]:
        """Take the first steps out of the queue."""
        removed = [self._waiting.popleft() for _ in range(count)]
        self._waiting_bytes[self._client] -= sum(len(payload) for _, payload in removed)
        if not self._waiting_bytes[self._client]:
            del self._waiting_bytes[self._client]
        self._left.set()
        return removed

    def _holds(self) -> bool:
        return self._may_hold([push.step for push, _ in self._waiting]) if self._waiting else False

    def _deliver_all(self) -> None:
        if self._waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._deliver_waiting())
            self._task.add_done_callback(self._log_fault)

    async def _deliver_waiting(self) -> None:
        """Hand over the first steps that wait, and those behind, up to where they are to be held."""
        works = False
        try:
            while self._waiting:
                together = self._remove(mergeable([push.step for push, _ in self._waiting]))
                try:
                    await self._deliver(together)
                finally:
                    self._unanswered.remove(len(together))
                if self._holds():
                    break
            works = True
        except RemoteError as error:
            logger.debug("a session of …%s cannot be pushed into: %s", self._client[-6:], error)
        finally:
            self._task = None
            if works:
                self.deliver_due()
            else:
                self.close()

    def _log_fault(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("handing steps of …%s on inside this server failed", self._client[-6:], exc_info=error)
