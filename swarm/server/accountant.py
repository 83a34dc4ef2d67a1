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

PEER_SHARE = 0.75
"""Of the cache, that one peer may hold: a client that takes all it can get leaves room for others."""


@dataclass(eq=False)
class _Waiter:
    holder: Hashable
    peer: str
    tokens: int
    granted: asyncio.Future[None]


class Accountant:
    """The books of one server's cache.

    Args:
        capacity: tokens that all holders together may have.
        peer_share: of the capacity, that the holders of one peer may have.
    """

    def __init__(self, capacity: int, peer_share: float = PEER_SHARE) -> None:
        self.capacity = capacity
        self.quota = max(1, int(capacity * peer_share)) if capacity else 0
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._peers: Counter[str] = Counter()
        self._waiters: list[_Waiter] = []

    @property
    def free(self) -> int:
        """Tokens that nobody holds."""
        return self.capacity - self._peers.total()

    def held(self, holder: Hashable) -> int:
        """Tokens that a holder has."""
        return self._held.get(holder, ("", 0))[1]

    def check(self, peer: str, tokens: int) -> None:
        """Raise `CacheFull` if `tokens` more for this peer would not fit now."""
        if not self._fits(peer, tokens) or self._waiters:
            raise self._full(peer, tokens)

    def take(self, holder: Hashable, peer: str, tokens: int) -> None:
        """Give a holder `tokens` more. Raises `CacheFull`, and changes nothing, if there is no room now."""
        self.check(peer, tokens)
        self._grant(holder, peer, tokens)

    async def wait(self, holder: Hashable, peer: str, tokens: int, patience: float) -> None:
        """As `take`, but wait up to `patience` seconds for room if there may ever be enough."""
        if patience <= 0 or tokens + self.held(holder) > self.quota:
            return self.take(holder, peer, tokens)
        waiter = _Waiter(holder, peer, tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._admit()
        try:
            async with asyncio.timeout(patience):
                await waiter.granted
        except TimeoutError:
            raise self._full(peer, tokens) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit()

    def give_back(self, holder: Hashable) -> None:
        """The holder needs nothing any more."""
        peer, tokens = self._held.pop(holder, ("", 0))
        self._peers[peer] -= tokens
        if not self._peers[peer]:
            del self._peers[peer]
        self._admit()

    def _admit(self) -> None:
        """Grant what those who wait can have."""
        while True:
            line = sorted(self._waiters, key=lambda one: self._peers[one.peer])
            # Who is held back by its own quota keeps nobody else waiting.
            first = next((one for one in line if self._peers[one.peer] + one.tokens <= self.quota), None)
            if first is None or first.tokens > self.free:
                return
            self._waiters.remove(first)
            self._grant(first.holder, first.peer, first.tokens)
            if not first.granted.done():
                first.granted.set_result(None)

    def _fits(self, peer: str, tokens: int) -> bool:
        return tokens <= self.free and self._peers[peer] + tokens <= self.quota

    def _grant(self, holder: Hashable, peer: str, tokens: int) -> None:
        self._held[holder] = peer, self.held(holder) + tokens
        self._peers[peer] += tokens

    def _full(self, peer: str, tokens: int) -> CacheFull:
        return CacheFull(
            f"{tokens} tokens of attention cache are needed and {max(0, self.free)} of {self.capacity} are free; this "
            f"peer holds {self._peers[peer]} of the {self.quota} that one peer may have. Ask for a smaller max_length, "
            "fewer rows, or another server"
        )
