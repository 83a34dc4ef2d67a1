"""Decides which requests run now, which wait, and which are rejected.

Laws:
- In any 60 seconds at most `requests_per_minute` requests of a key are accepted, and its requests use at most
  `tokens_per_minute`. The window slides exactly: a token bucket would let twice as much through in the minute after a
  pause. It has at most as many entries as the limit allows.
- The tokens of a request are reserved from its acceptance to its end. What it used then counts for 60 more seconds.
- What runs at the same time is counted in texts: a request may generate several, and each is a session on every server.
  A request waits until all of its texts fit, and requests that came later do not overtake it.
- Keys take turns. A key with a hundred waiting requests neither delays the first request of another key nor fills the
  queue: if the queue is full, the key with the most waiting requests loses its newest one.
- A request that ends while it waits has used no tokens and leaves no trace in the queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from swarm.gateway.api_keys import ApiKey, KeyLimits
from swarm.gateway.openai.api_errors import TooManyRequests

WINDOW_S = 60.0
"""Over which requests and tokens are counted."""

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
"""Bounds of the time to wait if it is not known when other requests end."""

LimitScope = Literal["key", "gateway"]


class NotAdmitted(TooManyRequests):
    """The request was not admitted.

    Attributes:
        scope: whether the key's own limits are used up, or the gateway is full.
    """

    def __init__(self, message: str, retry_after_s: float, scope: LimitScope) -> None:
        super().__init__(message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.scope = scope


class SlidingWindow:
    """A sum over the last 60 seconds: an amount added at `t` counts in `[t, t + 60)`."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._sum = 0

    def sum(self, now: float) -> int:
        """What counts now."""
        while self._entries and self._entries[0][0] <= now - WINDOW_S:
            self._sum -= self._entries.popleft()[1]
        return self._sum

    def add(self, now: float, amount: int) -> None:
        """Count an amount from now on; `now` never goes back."""
        self.sum(now)  # drops old entries, which nothing else would do for a key without limits
        if amount > 0:
            self._entries.append((now, amount))
            self._sum += amount

    def seconds_until(self, now: float, amount: int) -> float:
        """Seconds until the sum is at most `amount`, if nothing is added."""
        left, until = self.sum(now), now
        for when, entry in self._entries:
            if left <= amount:
                break
            left -= entry
            until = when + WINDOW_S
        return until - now


@dataclass
class KeyUsage:
    """What one key uses.

    Attributes:
        requests: accepted in the last minute.
        tokens: used in the last minute by requests that have ended.
        open: requests that run or wait.
        reserved: tokens of those.
    """

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    open: int = 0
    reserved: int = 0

    def check_limits(self, limits: KeyLimits, tokens: int, now: float) -> None:
        """Check whether the key may have one more request of this many tokens now.

        Raises:
            NotAdmitted: a limit would be exceeded.
        """
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise NotAdmitted(
                f"prompt and max_tokens are {tokens} tokens, and this key may use {limits.tokens_per_minute} a minute: "
                "ask for fewer",
                WINDOW_S,
                "key",
            )
        if limits.concurrent is not None and self.open >= limits.concurrent:
            raise NotAdmitted(
                f"this key may have {limits.concurrent} requests at once: wait until one has ended",
                MIN_RETRY_AFTER_S,
                "key",
            )
        if limits.requests_per_minute is not None and self.requests.sum(now) >= limits.requests_per_minute:
            wait_s = self.requests.seconds_until(now, limits.requests_per_minute - 1)
            raise NotAdmitted(
                f"this key may send {limits.requests_per_minute} requests a minute: "
                f"try again in {format_seconds(wait_s)}",
                wait_s,
                "key",
            )
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, tokens, now)

    def _check_tokens(self, limit: int, tokens: int, now: float) -> None:
        left = limit - self.reserved - self.tokens.sum(now)
        if tokens <= left:
            return
        # It is not known when running requests release what they have reserved.
        spare = limit - self.reserved - tokens
        wait_s = self.tokens.seconds_until(now, spare) if spare >= 0 else MAX_RETRY_AFTER_S
        raise NotAdmitted(
            f"this key may use {limit} tokens a minute and has {max(0, left)} left; this request reserves {tokens} "
            f"(prompt and max_tokens): try again in {format_seconds(wait_s)}, or ask for fewer",
            wait_s,
            "key",
        )


def format_seconds(seconds: float) -> str:
    """Whole seconds, rounded up, for messages."""
    return f"{max(1, -int(-seconds // 1))} s"


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over the keys; the items of one key stay in the order in which they came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str | None, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count_of(self, key_name: str | None) -> int:
        """How many items of this key wait."""
        return len(self._queues.get(key_name, ()))

    def push(self, key_name: str | None, item: T) -> None:
        """Add an item behind the others of its key. A key without items comes behind all keys that have some."""
        self._queues.setdefault(key_name, deque()).append(item)

    def first(self) -> T:
        """The item whose turn is next."""
        return next(iter(self._queues.values()))[0]

    def pop(self) -> T:
        """Remove and return the item whose turn is next; its key goes behind the others."""
        key_name = next(iter(self._queues))
        item = self._queues[key_name].popleft()
        self._queues.move_to_end(key_name)
        self._remove_if_empty(key_name)
        return item

    def remove(self, key_name: str | None, item: T) -> None:
        """Remove an item. Does nothing if it is not in the queue."""
        if item in self._queues.get(key_name, ()):
            self._queues[key_name].remove(item)
            self._remove_if_empty(key_name)

    def longest_key(self) -> str | None:
        """The key with the most items."""
        return max(self._queues, key=lambda key_name: len(self._queues[key_name]))

    def pop_newest(self, key_name: str | None) -> T:
        """Remove and return this key's last item."""
        item = self._queues[key_name].pop()
        self._remove_if_empty(key_name)
        return item

    def _remove_if_empty(self, key_name: str | None) -> None:
        if not self._queues[key_name]:
            del self._queues[key_name]


INITIAL_RUN_S = 5.0
"""Estimate of how long a request runs before any has ended."""

RUN_TIME_WEIGHT = 0.1
"""Weight of the newest request in the moving average of the run time."""


@dataclass(eq=False)
class AdmissionTicket:
    """Permission to run.

    Attributes:
        spent_tokens: what counts when the request ends: all that were reserved, unless others are reported.
    """

    spent_tokens: int

    def report_usage(self, tokens: int) -> None:
        """Set how many tokens prompt and answer took."""
        self.spent_tokens = max(0, tokens)


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
