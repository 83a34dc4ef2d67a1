"""Who holds how much of the attention cache. What was granted is held until it is given back, used or not.

- Nobody is granted more than is free, and no peer more than its share of the whole.
- Who finds no room may wait. Room that becomes free goes to the peers that hold least, among these to who came first;
  a large request at the head of the line is not overtaken by smaller ones behind it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.errors import CacheFull

MAX_PEER_CACHE_SHARE = 0.75
"""Of the cache, that one peer may hold: a client that takes all it can get leaves room for others."""


@dataclass(eq=False)
class _WaitingAllocation:
    """Somebody in the line.

    Attributes:
        decided: done once it has left the line: with its tokens if `granted`.
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
    """The books of one server's cache.

    Args:
        capacity: tokens that all holders together may have.
        peer_share: of the capacity, that the holders of one peer may have.
    """

    def __init__(self, capacity: int, peer_share: float = MAX_PEER_CACHE_SHARE) -> None:
        self.capacity = capacity
        self.quota = max(1, int(capacity * peer_share)) if capacity else 0
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._peers: Counter[str] = Counter()
        self._waiters: list[_WaitingAllocation] = []
        self._closing = False

    @property
    def free(self) -> int:
        """Tokens that nobody holds."""
        return self.capacity - self._peers.total()

    def held(self, holder: Hashable) -> int:
        """Tokens that a holder has."""
        return self._held.get(holder, ("", 0))[1]

    def take(self, holder: Hashable, peer: str, tokens: int) -> None:
        """Give a holder `tokens` more. Raises `CacheFull`, and changes nothing, if it cannot have them now."""
        first = self._first()
        overtakes = first is not None and self._peers[first.peer] <= self._peers[peer]
        if overtakes or tokens > self.free or self._peers[peer] + tokens > self.quota:
            raise self._full(peer, tokens)
        self._grant(holder, peer, tokens)

    async def wait(self, holder: Hashable, peer: str, tokens: int, patience: float) -> None:
        """As `take`, but wait up to `patience` seconds for room if there may ever be enough.

        Raises `CacheFull` too when the holder gives back what it has meanwhile. Who is cancelled holds no more than
        before, even if it was granted at that very moment.
        """
        if patience <= 0 or self._closing or tokens + self.held(holder) > self.quota:
            return self.take(holder, peer, tokens)
        waiter = _WaitingAllocation(holder, peer, tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._admit()
        try:
            # Unlike `wait_for`, this leaves the decision alone: a grant and the end of the patience may come together.
            await asyncio.wait([waiter.decided], timeout=patience)
        except BaseException:
            if waiter.granted:
                self._take_back(holder, tokens)
            raise
        finally:
            self._leave_line(waiter)
        if not waiter.granted:
            raise self._full(peer, tokens)

    def give_back(self, holder: Hashable) -> None:
        """The holder needs nothing any more, and waits for nothing. It is never seen again."""
        for waiter in [waiter for waiter in self._waiters if waiter.holder == holder]:
            self._waiters.remove(waiter)
            waiter.decide(False)
        self._take_back(holder, self.held(holder))

    def close(self) -> None:
        """From now on nobody waits for room, and who does is told that there is none."""
        self._closing = True
        for waiter in self._waiters:
            waiter.decide(False)
        self._waiters.clear()

    def _first(self) -> _WaitingAllocation | None:
        """Who is next in the line. Who is held back by its own quota keeps nobody else waiting."""
        line = [one for one in self._waiters if self._peers[one.peer] + one.tokens <= self.quota]
        return min(line, key=lambda one: self._peers[one.peer], default=None)

    def _admit(self) -> None:
        """Grant what those who wait can have."""
        while (first := self._first()) is not None and first.tokens <= self.free:
            self._waiters.remove(first)
            self._grant(first.holder, first.peer, first.tokens)
            first.decide(True)

    def _leave_line(self, waiter: _WaitingAllocation) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._admit()

    def _grant(self, holder: Hashable, peer: str, tokens: int) -> None:
        self._held[holder] = peer, self.held(holder) + tokens
        self._peers[peer] += tokens

    def _take_back(self, holder: Hashable, tokens: int) -> None:
        peer, held = self._held.pop(holder, ("", 0))
        tokens = min(tokens, held)  # a holder that was granted room may have given back all since
        if held > tokens:
            self._held[holder] = peer, held - tokens
        self._peers[peer] -= tokens
        if not self._peers[peer]:
            del self._peers[peer]
        self._admit()

    def _full(self, peer: str, tokens: int) -> CacheFull:
        others = f", {len(self._waiters)} others wait" if self._waiters else ""
        return CacheFull(
            f"{tokens} tokens of attention cache are needed and {max(0, self.free)} of {self.capacity} are "
            f"free{others}; this peer holds {self._peers[peer]} of the {self.quota} that one peer may have. Ask for a "
            "smaller max_length, fewer rows, or another server"
        )
