"""Who may begin now, who waits, and who is refused.

Laws:
- In any 60 seconds at most `requests_per_minute` requests of a key are taken, and what all of its requests that ran
  then used is at most `tokens_per_minute`. So a window slides, exactly; a bucket that fills up by and by would let
  twice as much through in the minute after a rest. It has at most as many entries as the limit allows.
- Tokens are reserved from when a request is taken until it ends, and what it used counts for 60 seconds more.
- What runs at once is counted in texts, of which a request may have several: each is a session on every server. A
  request waits until all of its texts have room, and nobody who came later passes it meanwhile.
- Keys take turns. One that waits a hundred times neither holds up another key's first request nor fills the queue with
  its own: where the queue is full, the key that waits most often gives way.
- What ends while it waits, for whatever reason, has used no tokens and leaves no trace in the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from swarm.gateway.failures import TooMany
from swarm.gateway.keys import Key, Limits
from swarm.gateway.turns import Turns

WINDOW = 60.0
"""Seconds over which requests and tokens are counted."""

SOON, LATE = 1.0, 60.0
"""Seconds: bounds of what somebody is told to wait where nobody knows when others end."""

USUAL = 5.0
"""Seconds that a request is taken to run before any has ended."""

NEWEST = 0.1
"""Weight of the request that ended last in the mean time of running."""

Scope = Literal["key", "gateway"]


class Refused(TooMany):
    """The request was not let in.

    Attributes:
        scope: whether the key's own limits are used up, or the gateway is full.
    """

    def __init__(self, message: str, retry_after: float, scope: Scope) -> None:
        super().__init__(message, code="rate_limit_exceeded", retry_after=retry_after)
        self.scope = scope


class Window:
    """Sums over the last 60 seconds: what was at `t` counts in `[t, t + 60)`."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._sum = 0

    def sum(self, now: float) -> int:
        """What counts now."""
        while self._entries and self._entries[0][0] <= now - WINDOW:
            self._sum -= self._entries.popleft()[1]
        return self._sum

    def add(self, now: float, amount: int) -> None:
        """Count from now on; `now` never goes back."""
        self.sum(now)  # forgets what is old, though nobody may ever ask: a key without limits would collect it
        if amount > 0:
            self._entries.append((now, amount))
            self._sum += amount

    def wait(self, now: float, amount: int) -> float:
        """Seconds until at most `amount` counts, if nothing is added."""
        left, until = self.sum(now), now
        for when, entry in self._entries:
            if left <= amount:
                break
            left -= entry
            until = when + WINDOW
        return until - now


@dataclass(eq=False)
class Ticket:
    """Leave to run.

    Attributes:
        tokens: reserved: of the prompt, and the most that the answer may have.
    """

    tokens: int
    _used: int | None = None

    def used(self, tokens: int) -> None:
        """What it took in the end, of prompt and answer. Whoever never says has used all that was reserved."""
        self._used = max(0, tokens)

    @property
    def spent(self) -> int:
        """What counts when it ends."""
        return self.tokens if self._used is None else self._used


@dataclass
class Account:
    """What one key uses.

    Attributes:
        open: requests that run or wait.
        reserved: tokens of those.
    """

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    open: int = 0
    reserved: int = 0

    def check(self, limits: Limits, tokens: int, now: float) -> None:
        """Raises `Refused` if one more request of so many tokens is too much now."""
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise Refused(
                f"prompt and max_tokens are {tokens} tokens, and this key may use {limits.tokens_per_minute} a minute: "
                "ask for fewer",
                WINDOW,
                "key",
            )
        if limits.concurrent is not None and self.open >= limits.concurrent:
            raise Refused(
                f"this key may have {limits.concurrent} requests at once: wait until one has ended", SOON, "key"
            )
        if limits.requests_per_minute is not None and self.requests.sum(now) >= limits.requests_per_minute:
            wait = self.requests.wait(now, limits.requests_per_minute - 1)
            raise Refused(
                f"this key may begin {limits.requests_per_minute} requests a minute: try again in {_seconds(wait)}",
                wait,
                "key",
            )
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, tokens, now)

    def _check_tokens(self, limit: int, tokens: int, now: float) -> None:
        room = limit - self.reserved - self.tokens.sum(now)
        if tokens <= room:
            return
        # Where running requests have reserved it, nobody knows when it is free again.
        spare = limit - self.reserved - tokens
        wait = self.tokens.wait(now, spare) if spare >= 0 else LATE
        raise Refused(
            f"this key may use {limit} tokens a minute and has {max(0, room)} left; this request reserves {tokens} "
            f"(prompt and max_tokens): try again in {_seconds(wait)}, or ask for fewer",
            wait,
            "key",
        )


def _seconds(wait: float) -> str:
    return f"{max(1, -int(-wait // 1))} s"


@dataclass(frozen=True, eq=False)
class Waiter:
    """A request in the queue.

    Attributes:
        texts: that need room.
        turn: done when it has come.
    """

    texts: int
    turn: asyncio.Future[None]


class Admission:
    """Lets requests in. One for a gateway, in one event loop.

    Args:
        concurrent: texts that are computed at once; a request of more runs alone.
        queue: requests that wait at most.
        now: monotonic clock in seconds.
    """

    def __init__(self, concurrent: int, queue: int, now: Callable[[], float]) -> None:
        self._concurrent = concurrent
        self._queue = queue
        self._now = now
        self._turns: Turns[Waiter] = Turns()
        self._running = 0
        self._texts = 0
        self._mean = USUAL
        self._accounts: dict[str, Account] = {}

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._turns)

    def check(self, key: Key | None, tokens: int) -> Account:
        """The key's account, if one more request of so many tokens is within its limits. Raises `Refused`."""
        if key is None:
            return Account()
        account = self._accounts.setdefault(key.name, Account())
        account.check(key.limits, tokens, self._now())
        return account

    @asynccontextmanager
    async def enter(self, key: Key | None, tokens: int, texts: int = 1) -> AsyncIterator[Ticket]:
        """Wait for a turn, then run inside of the context.

        Args:
            key: whose limits and turns count; None for a gateway without keys.
            tokens: to reserve: the prompt's, and the most that the answer may have.
            texts: that the request generates.

        Raises:
            Refused: at once if a limit of the key is used up or the queue is full; later if the queue is full and the
                key waits more often than others.
        """
        name = key.name if key is not None else None
        account = self.check(key, tokens)
        texts = min(texts, self._concurrent)
        if not self._free(texts):
            self._make_room(name)
        account.requests.add(self._now(), 1)
        account.open += 1
        account.reserved += tokens
        spent = 0
        try:
            await self._turn(name, texts)
            ticket = Ticket(tokens)
            began = self._now()
            try:
                yield ticket
            finally:
                spent = ticket.spent
                self._ended(texts, self._now() - began)
        finally:
            account.open -= 1
            account.reserved -= tokens
            account.tokens.add(self._now(), spent)

    def _free(self, texts: int) -> bool:
        return not self._turns and self._fits(texts)

    def _fits(self, texts: int) -> bool:
        return self._texts + texts <= self._concurrent

    def _make_room(self, name: str | None) -> None:
        """For one more that waits. Raises `Refused` if this key has to give way itself."""
        if len(self._turns) < self._queue:
            return
        greediest = self._turns.greediest() if self._turns else name
        if self._turns.waiting(greediest) <= self._turns.waiting(name) + 1:
            raise self._full()
        waiter = self._turns.pop_newest(greediest)
        if not waiter.turn.done():
            waiter.turn.set_exception(self._full())
        self._admit()

    def _full(self) -> Refused:
        wait = min(LATE, max(SOON, self._mean * (len(self._turns) + 1) / self._concurrent))
        return Refused(
            f"the gateway is busy: {self._running} requests run and {len(self._turns)} wait; "
            f"try again in {_seconds(wait)}",
            wait,
            "gateway",
        )

    async def _turn(self, name: str | None, texts: int) -> None:
        if self._free(texts):
            self._begin(texts)
            return
        waiter = Waiter(texts, asyncio.get_running_loop().create_future())
        self._turns.push(name, waiter)
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._leave(texts)  # cancelled when its turn had come already
            else:
                self._turns.remove(name, waiter)
                self._admit()
            raise

    def _begin(self, texts: int) -> None:
        self._running += 1
        self._texts += texts

    def _ended(self, texts: int, seconds: float) -> None:
        self._mean += NEWEST * (seconds - self._mean)
        self._leave(texts)

    def _leave(self, texts: int) -> None:
        self._running -= 1
        self._texts -= texts
        self._admit()

    def _admit(self) -> None:
        """Room is given to whoever is next at once, so that nobody who comes now slips in before."""
        while self._turns and (self._turns.first().turn.done() or self._fits(self._turns.first().texts)):
            waiter = self._turns.pop()
            if not waiter.turn.done():
                waiter.turn.set_result(None)
                self._begin(waiter.texts)
