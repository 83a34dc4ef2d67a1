"""Keeps account of one kind of a server's memory: how much each peer holds. An allocation is held until it is released,
used or not.

- No allocation exceeds what is free, and no peer holds more than its share of the whole.
- An allocation may wait. What becomes free goes to the peer that holds least in proportion to its standing; among
  equals, to the first in the queue. Smaller allocations do not overtake a large one at the head of the queue.
- Part of a pool can be reserved for peers of full standing, so that new ones never hold all of it, however many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from swarm.common.units import format_bytes
from swarm.errors import CacheFull, MemoryFull

MAX_PEER_CACHE_SHARE = 0.75
"""Share of the cache that one peer may hold, so that a client which takes all it can get leaves some for others."""

MAX_WAITING = 64
"""Allocations of one peer that may wait at once: the more wait, the longer it takes to find the next one."""

MIN_WEIGHT = 0.1
"""Weight of a peer without standing in the queue, where a peer of full standing has the weight 1."""


@dataclass(frozen=True)
class PoolKind:
    """What a pool holds, in the words of its refusals.

    Attributes:
        error: what is raised if there is not enough.
        amount: an amount as text.
        name: of what is held.
        advice: what a refused peer can do.
    """

    error: type[CacheFull]
    amount: Callable[[int], str]
    name: str
    advice: str


CACHE_TOKENS = PoolKind(
    CacheFull,
    lambda tokens: f"{tokens}",
    "tokens of attention cache",
    "Ask for a smaller max_length, fewer sequences, or another server",
)

REQUEST_BYTES = PoolKind(
    MemoryFull, format_bytes, "of memory for requests", "Send smaller requests, fewer at once, or ask another server"
)


@dataclass(eq=False)
class _WaitingAllocation:
    """An allocation in the queue.

    Attributes:
        decided: done once it has left the queue, with its amount if `granted`.
    """

    holder: Hashable
    peer: str
    amount: int
    decided: asyncio.Future[None]
    granted: bool = False

    def decide(self, granted: bool) -> None:
        self.granted = granted
        self.decided.set_result(None)


class MemoryPool:
    """Keeps track of what each holder has of one kind of memory.

    Args:
        capacity: what all holders together may have.
        peer_share: share of the capacity that all holders of one peer may have together.
        kind: what is held.
        standing: of a peer, 0 to 1 (see `peer_standing`).
        new_peers_share: share of the capacity that peers of less than full standing may have together.
    """

    def __init__(
        self,
        capacity: int,
        peer_share: float = MAX_PEER_CACHE_SHARE,
        kind: PoolKind = CACHE_TOKENS,
        standing: Callable[[str], float] = lambda peer: 1.0,
        new_peers_share: float = 1.0,
    ) -> None:
        self.capacity = capacity
        self.quota = max(1, int(capacity * peer_share)) if capacity else 0
        self._kind = kind
        self._standing = standing
        self._new_peers_quota = int(capacity * new_peers_share)
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._peers: Counter[str] = Counter()
        self._total = 0
        self._queue: list[_WaitingAllocation] = []
        self._closing = False

    @property
    def free(self) -> int:
        """What is not held."""
        return self.capacity - self._total

    @property
    def least_waiting_rank(self) -> float | None:
        """The rank of the peer that comes first of those that wait; None if nobody waits."""
        return min((self.rank(one.peer) for one in self._queue), default=None)

    def rank(self, peer: str) -> float:
        """What a peer holds in proportion to its standing: the least goes first."""
        held = self._peers[peer]
        return held / max(MIN_WEIGHT, self._standing(peer)) if held else 0.0

    def comes_next(self, holder: Hashable, peer: str) -> bool:
        """Whether what becomes free goes to a holder: it is the first in the queue, or would be."""
        first = self._next_in_queue()
        return first is None or first.holder == holder or self.rank(peer) < self.rank(first.peer)

    def held_by(self, holder: Hashable) -> int:
        """What a holder has."""
        return self._held.get(holder, ("", 0))[1]

    def held_by_peer(self, peer: str) -> int:
        """What the holders of a peer have."""
        return self._peers[peer]

    def allocate(self, holder: Hashable, peer: str, amount: int, *, may_overtake: bool = False) -> None:
        """Give a holder `amount` more. Raises `CacheFull`, and changes nothing, if that is not available now.

        Args:
            may_overtake: whether the amount is so small that it need not wait behind others.
        """
        first = self._next_in_queue() if self._queue and not may_overtake else None
        overtakes = first is not None and self.rank(first.peer) <= self.rank(peer)
        if overtakes or amount > self.free or not self._within_quota(peer, amount):
            raise self._full(peer, amount)
        self._grant(holder, peer, amount)

    def allocate_at_once(self, holder: Hashable, peer: str, amount: int) -> bool:
        """Give a holder `amount` more if nobody waits and that is available now; whether it was."""
        if self._queue or amount > self.free or not self._within_quota(peer, amount):
            return False
        self._grant(holder, peer, amount)
        return True

    async def allocate_or_wait(self, holder: Hashable, peer: str, amount: int, timeout_s: float) -> None:
        """Like `allocate`, but wait up to `timeout_s` for what becomes free, unless there can never be enough or
        `MAX_WAITING` others of the peer wait.

        Also raises `CacheFull` if the holder is released meanwhile. A call that is cancelled allocates nothing, even if
        its amount was granted at that very moment.
        """
        if self.allocate_at_once(holder, peer, amount):
            return None
        if timeout_s <= 0 or self._closing or amount + self.held_by(holder) > self.quota:
            return self.allocate(holder, peer, amount)
        if sum(one.peer == peer for one in self._queue) >= MAX_WAITING:
            raise self._full(peer, amount)
        waiter = _WaitingAllocation(holder, peer, amount, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._grant_waiting()
        try:
            # Unlike `wait_for`, this does not cancel the decision: a grant and the timeout may come together.
            await asyncio.wait([waiter.decided], timeout=timeout_s)
        except BaseException:
            if waiter.granted:
                self._take_back(holder, amount)
            raise
        finally:
            self._leave_queue(waiter)
        if not waiter.granted:
            raise self._full(peer, amount)

    def release(self, holder: Hashable) -> None:
        """Free all that a holder has, and end its waiting."""
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

    def _within_quota(self, peer: str, amount: int, new_peers_held: int | None = None) -> bool:
        """Whether a peer may have this much more, if it is free.

        Args:
            new_peers_held: what all peers of less than full standing have; None if it has to be counted.
        """
        if self._peers[peer] + amount > self.quota:
            return False
        most = self._new_peers_quota
        if self._total + amount <= most or self._standing(peer) >= 1:
            return True
        return (self._new_peers_held() if new_peers_held is None else new_peers_held) + amount <= most

    def _new_peers_held(self) -> int:
        return sum(held for peer, held in self._peers.items() if self._standing(peer) < 1)

    def _next_in_queue(self) -> _WaitingAllocation | None:
        """The allocation to grant next. One that would exceed its peer's quota does not hold up the others."""
        held = self._new_peers_held() if self._queue and self._new_peers_quota < self.capacity else 0
        line = [one for one in self._queue if self._within_quota(one.peer, one.amount, held)]
        return min(line, key=lambda one: self.rank(one.peer), default=None)

    def _grant_waiting(self) -> None:
        """Grant the waiting allocations that fit."""
        while (first := self._next_in_queue()) is not None and first.amount <= self.free:
            self._queue.remove(first)
            self._grant(first.holder, first.peer, first.amount)
            first.decide(True)

    def _leave_queue(self, waiter: _WaitingAllocation) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
            self._grant_waiting()

    def _grant(self, holder: Hashable, peer: str, amount: int) -> None:
        self._held[holder] = peer, self.held_by(holder) + amount
        self._peers[peer] += amount
        self._total += amount

    def _take_back(self, holder: Hashable, amount: int) -> None:
        peer, held = self._held.pop(holder, ("", 0))
        amount = min(amount, held)  # a holder that was granted something may have been released since
        if held > amount:
            self._held[holder] = peer, held - amount
        self._peers[peer] -= amount
        self._total -= amount
        if not self._peers[peer]:
            del self._peers[peer]
        if self._queue:
            self._grant_waiting()

    def _full(self, peer: str, amount: int) -> CacheFull:
        others = f", {len(self._queue)} others wait" if self._queue else ""
        text = self._kind.amount
        return self._kind.error(
            f"{text(amount)} {self._kind.name} are needed and {text(max(0, self.free))} of {text(self.capacity)} are "
            f"free{others}; this peer holds {text(self._peers[peer])} of the {text(self.quota)} that one peer may "
            f"have. {self._kind.advice}"
        )
