"""Decides which requests run now, which wait, and which are rejected.

Laws, beside those of `rate_limits`:
- What runs at the same time is counted in texts: a request may generate several, and each is a session on every server.
  A request waits until all of its texts fit, and requests that came later do not overtake it.
- Keys take turns. A key with a hundred waiting requests neither delays the first request of another key nor fills the
  queue: if the queue is full, the key with the most waiting requests loses its newest one.
- A request that ends while it waits has used no tokens and leaves no trace in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm.gateway.admission.api_keys import ApiKey
from swarm.gateway.admission.fair_queue import FairQueue
from swarm.gateway.admission.rate_limits import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    KeyUsage,
    NotAdmitted,
    format_seconds,
)

INITIAL_RUN_S = 5.0
"""Estimate of how long a request runs before any has ended."""

RUN_TIME_WEIGHT = 0.1
"""Weight of the newest request in the moving average of the run time."""


@dataclass(eq=False)
class AdmissionTicket:
    """Permission to run.

    Attributes:
        reserved_tokens: the prompt's, and the most that the answer may have.
    """

    reserved_tokens: int
    _used_tokens: int | None = None

    def report_usage(self, tokens: int) -> None:
        """Set how many tokens prompt and answer took. Without a report, all reserved tokens count as used."""
        self._used_tokens = max(0, tokens)

    @property
    def spent_tokens(self) -> int:
        """What counts when the request ends."""
        return self.reserved_tokens if self._used_tokens is None else self._used_tokens


@dataclass(frozen=True, eq=False)
class PendingAdmission:
    """A request in the queue.

    Attributes:
        texts: that it generates.
        admitted: done when the request may run.
    """

    texts: int
    admitted: asyncio.Future[None]


class AdmissionControl:
    """Admits requests. One for each gateway, in one event loop.

    Args:
        max_texts: texts that are generated at the same time. A request of more runs alone.
        max_waiting: requests in the queue.
        now: monotonic clock in seconds.
    """

    def __init__(self, max_texts: int, max_waiting: int, now: Callable[[], float]) -> None:
        self._max_texts = max_texts
        self._max_waiting = max_waiting
        self._now = now
        self._queue: FairQueue[PendingAdmission] = FairQueue()
        self._running = 0
        self._running_texts = 0
        self._mean_run_s = INITIAL_RUN_S
        self._usage: dict[str, KeyUsage] = {}

    @property
    def running(self) -> int:
        """Number of requests that run."""
        return self._running

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    def check_limits(self, key: ApiKey | None, tokens: int) -> KeyUsage:
        """The key's usage, if one more request of this many tokens stays within its limits.

        Raises:
            NotAdmitted: a limit of the key would be exceeded.
        """
        if key is None:
            return KeyUsage()
        usage = self._usage.setdefault(key.name, KeyUsage())
        usage.check_limits(key.limits, tokens, self._now())
        return usage

    @asynccontextmanager
    async def admit(self, key: ApiKey | None, tokens: int, texts: int = 1) -> AsyncIterator[AdmissionTicket]:
        """Wait until the request may run, then run it inside of the context.

        Args:
            key: whose limits and turns count; None for a gateway without keys.
            tokens: to reserve: the prompt's, and the most that the answer may have.
            texts: that the request generates.

        Raises:
            NotAdmitted: at once if a limit of the key is used up or the queue is full; later if the queue has become
                full and the key has more waiting requests than others.
        """
        key_name = key.name if key is not None else None
        usage = self.check_limits(key, tokens)
        texts = min(texts, self._max_texts)
        if not self._can_start(texts):
            self._ensure_queue_space(key_name)
        usage.requests.add(self._now(), 1)
        usage.open += 1
        usage.reserved += tokens
        spent = 0
        try:
            await self._wait_turn(key_name, texts)
            ticket = AdmissionTicket(tokens)
            started_at = self._now()
            try:
                yield ticket
            finally:
                spent = ticket.spent_tokens
                self._mean_run_s += RUN_TIME_WEIGHT * (self._now() - started_at - self._mean_run_s)
                self._release(texts)
        finally:
            usage.open -= 1
            usage.reserved -= tokens
            usage.tokens.add(self._now(), spent)

    def _can_start(self, texts: int) -> bool:
        return not self._queue and self._fits(texts)

    def _fits(self, texts: int) -> bool:
        return self._running_texts + texts <= self._max_texts

    def _ensure_queue_space(self, key_name: str | None) -> None:
        """Make room for one more request of this key in the queue, by rejecting one of a key with more.

        Raises:
            NotAdmitted: the queue is full, and no other key has more waiting requests.
        """
        if len(self._queue) < self._max_waiting:
            return
        longest = self._queue.longest_key() if self._queue else key_name
        if self._queue.count_of(longest) <= self._queue.count_of(key_name) + 1:
            raise self._queue_full()
        pending = self._queue.pop_newest(longest)
        if not pending.admitted.done():
            pending.admitted.set_exception(self._queue_full())
        self._start_next()

    def _queue_full(self) -> NotAdmitted:
        wait_s = self._mean_run_s * (len(self._queue) + 1) / self._max_texts
        wait_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))
        return NotAdmitted(
            f"the gateway is busy: {self._running} requests run and {len(self._queue)} wait; "
            f"try again in {format_seconds(wait_s)}",
            wait_s,
            "gateway",
        )

    async def _wait_turn(self, key_name: str | None, texts: int) -> None:
        if self._can_start(texts):
            self._occupy(texts)
            return
        pending = PendingAdmission(texts, asyncio.get_running_loop().create_future())
        self._queue.push(key_name, pending)
        try:
            await pending.admitted
        except (asyncio.CancelledError, NotAdmitted):
            if pending.admitted.done() and not pending.admitted.cancelled() and pending.admitted.exception() is None:
                self._release(texts)  # cancelled after it was admitted
            else:
                self._queue.remove(key_name, pending)
                self._start_next()
            raise

    def _occupy(self, texts: int) -> None:
        self._running += 1
        self._running_texts += texts

    def _release(self, texts: int) -> None:
        self._running -= 1
        self._running_texts -= texts
        self._start_next()

    def _start_next(self) -> None:
        """Admit waiting requests as far as they fit, at once, so that a new request cannot overtake them."""
        while self._queue and (self._queue.first().admitted.done() or self._fits(self._queue.first().texts)):
            pending = self._queue.pop()
            if not pending.admitted.done():
                pending.admitted.set_result(None)
                self._occupy(pending.texts)
