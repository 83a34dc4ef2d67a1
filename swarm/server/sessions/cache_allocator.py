"""Allocation of the attention cache. Tokens that were allocated are held until they are released, used or not.

- No allocation exceeds what is free, and no peer holds more than its share of the whole.
- An allocation may wait. Tokens that become free go to the peers that hold least, and among these to the first in the
  queue. A large allocation at the head of the queue is not overtaken by smaller ones behind it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.errors import CacheFull

MAX_PEER_CACHE_SHARE = 0.75
"""Share of the cache that one peer may hold, so that a client which takes all it can get leaves some for others."""


@dataclass(eq=False)
class _WaitingAllocation:
    """An allocation in the queue.

    Attributes:
        decided: done once it has left the queue, with its tokens if `granted`.
    """

    holder: Hashable
    peer: str
    tokens: int
    decided: asyncio.Future[None]
    granted: bool = False

    def decide(self, granted: bool) -> None:
        self.granted = granted
        self.decided.set_result(None)


class CacheAllocator:
    """Keeps track of the tokens that each holder has of one server's cache.

    Args:
        capacity: tokens that all holders together may have.
        peer_share: share of the capacity that the holders of one peer may have.
    """

    def __init__(self, capacity: int, peer_share: float = MAX_PEER_CACHE_SHARE) -> None:
        self.capacity = capacity
        self.quota = max(1, int(capacity * peer_share)) if capacity else 0
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._peers: Counter[str] = Counter()
        self._queue: list[_WaitingAllocation] = []
        self._closing = False

    @property
    def free(self) -> int:
        """Tokens that are not held."""
        return self.capacity - self._peers.total()

    def held_by(self, holder: Hashable) -> int:
        """Tokens that a holder has."""
        return self._held.get(holder, ("", 0))[1]

    def allocate(self, holder: Hashable, peer: str, tokens: int) -> None:
        """Give a holder `tokens` more. Raises `CacheFull`, and changes nothing, if they are not available now."""
        first = self._next_in_queue()
        overtakes = first is not None and self._peers[first.peer] <= self._peers[peer]
        if overtakes or tokens > self.free or self._peers[peer] + tokens > self.quota:
            raise self._full(peer, tokens)
        self._grant(holder, peer, tokens)

    async def allocate_or_wait(self, holder: Hashable, peer: str, tokens: int, timeout_s: float) -> None:
        """Like `allocate`, but wait up to `timeout_s` for free tokens, unless there can never be enough.

        Also raises `CacheFull` if the holder is released meanwhile. A call that is cancelled allocates nothing, even if
        the tokens were granted at that very moment.
        """
        if timeout_s <= 0 or self._closing or tokens + self.held_by(holder) > self.quota:
            return self.allocate(holder, peer, tokens)
        waiter = _WaitingAllocation(holder, peer, tokens, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._grant_waiting()
        try:
            # Unlike `wait_for`, this does not cancel the decision: a grant and the timeout may come together.
            await asyncio.wait([waiter.decided], timeout=timeout_s)
        except BaseException:
            if waiter.granted:
                self._take_back(holder, tokens)
            raise
        finally:
            self._leave_queue(waiter)
        if not waiter.granted:
            raise self._full(peer, tokens)

    def release(self, holder: Hashable) -> None:
        """Free all tokens of a holder, and end its waiting."""
        for waiter in [waiter for waiter in self._queue if waiter.holder == holder]:
            self._queue.remove(waiter)
            waiter.decide(False)
        self._take_back(holder, self.held_by(holder))

    def refuse_waiting(self) -> None:
        """From now on no allocation waits, and those that do fail with `CacheFull`."""
        self._closing = True
        for waiter in self._queue:
            waiter.decide(False)
        self._queue.clear()

    def _next_in_queue(self) -> _WaitingAllocation | None:
        """The allocation to grant next. One that would exceed its peer's quota does not hold up the others."""
        line = [one for one in self._queue if self._peers[one.peer] + one.tokens <= self.quota]
        return min(line, key=lambda one: self._peers[one.peer], default=None)

    def _grant_waiting(self) -> None:
        """Grant the waiting allocations that fit."""
        while (first := self._next_in_queue()) is not None and first.tokens <= self.free:
            self._queue.remove(first)
            self._grant(first.holder, first.peer, first.tokens)
            first.decide(True)

    def _leave_queue(self, waiter: _WaitingAllocation) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
            self._grant_waiting()

    def _grant(self, holder: Hashable, peer: str, tokens: int) -> None:
        self._held[holder] = peer, self.held_by(holder) + tokens
        self._peers[peer] += tokens

    def _take_back(self, holder: Hashable, tokens: int) -> None:
        peer, held = self._held.pop(holder, ("", 0))
        tokens = min(tokens, held)  # a holder that was granted tokens may have been released since
        if held > tokens:
            self._held[holder] = peer, held - tokens
        self._peers[peer] -= tokens
        if not self._peers[peer]:
            del self._peers[peer]
        self._grant_waiting()

    def _full(self, peer: str, tokens: int) -> CacheFull:
        others = f", {len(self._queue)} others wait" if self._queue else ""
        return CacheFull(
            f"{tokens} tokens of attention cache are needed and {max(0, self.free)} of {self.capacity} are "
            f"free{others}; this peer holds {self._peers[peer]} of the {self.quota} that one peer may have. Ask for a "
            "smaller max_length, fewer sequences, or another server"
        )
