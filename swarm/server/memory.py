"""What peers make a server hold: charged before it is allocated, with a cap for each peer and one budget for all.

Cache of sessions and memory of requests are charged in the same way, each to a `MemoryPool` of its own. Where cache is
short, `choose_leaving` says which sessions are asked to leave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swarm.common.units import format_bytes
from swarm.errors import CacheFull, MemoryFull

S = TypeVar("S", bound=Hashable)

MAX_PEER_CACHE_SHARE = 0.75
"""Share of the cache that one peer may hold, so that a client which takes all it can get leaves some for others."""

MAX_WAITING = 64
"""Charges of one peer that may wait at once: the more wait, the longer it takes to find the next one."""

MAKE_ROOM_PERIOD_S = 1.0
"""Time between attempts to make room for whoever waits."""

IDLE_AFTER_S = 60.0
"""Seconds without a step after which a session gives way to any other."""

KEPT_CACHE_SHARE = 0.125
"""Share of the cache that a peer keeps when others need cache. What it holds beyond is on loan."""


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
class _WaitingCharge:
    """A charge in the queue.

    Attributes:
        weight: how often as much as others its peer may hold and still go before them.
        decided: set once it has left the queue, with its amount if `granted`.
    """

    holder: Hashable
    peer: str
    amount: int
    weight: float = 1.0
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    granted: bool = False

    def decide(self, granted: bool) -> None:
        self.granted = granted
        self.decided.set()


class MemoryPool:
    """Keeps account of one kind of memory: how much each holder has, until it is released, used or not.

    A charge may wait. What becomes free goes to the peer that holds least for its weight; among equals, to the first in
    the queue.
    Smaller charges do not overtake a large one at the head of the queue.

    Args:
        capacity: what all holders together may have.
        peer_share: share of the capacity that all holders of one peer may have together.
        kind: what is held.
    """

    def __init__(self, capacity: int, peer_share: float = MAX_PEER_CACHE_SHARE, kind: PoolKind = CACHE_TOKENS) -> None:
        self.capacity = capacity
        self.quota = max(1, int(capacity * peer_share)) if capacity else 0
        self._kind = kind
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._peers: Counter[str] = Counter()
        self._total = 0
        self._queue: list[_WaitingCharge] = []
        self._closing = False

    @property
    def free(self) -> int:
        """What is not held."""
        return self.capacity - self._total

    def held_by(self, holder: Hashable) -> int:
        """What a holder has."""
        return self._held.get(holder, ("", 0))[1]

    def held_by_peer(self, peer: str) -> int:
        """What the holders of a peer have."""
        return self._peers[peer]

    def charge(self, holder: Hashable, peer: str, amount: int) -> None:
        """Give a holder `amount` more, whoever waits. Raises `CacheFull`, and changes nothing, if it is not free."""
        if amount > self.free or not self._within_quota(peer, amount):
            raise self._full(peer, amount)
        self._grant(holder, peer, amount)

    async def charge_or_wait(
        self,
        holder: Hashable,
        peer: str,
        amount: int,
        timeout_s: float,
        make_room: Callable[[], None] = lambda: None,
        weight: float = 1.0,
    ) -> None:
        """Give a holder `amount` more; wait up to `timeout_s` for what becomes free.

        Raises `CacheFull`, and changes nothing, if there is not enough by then, or never can be, or if the holder is
        released meanwhile. If the call is canceled, nothing is charged, even if it was granted at that very moment.

        Args:
            make_room: called now and then while this charge is the next one and there is not enough.
            weight: see `_WaitingCharge`.
        """
        if not self._queue and amount <= self.free and self._within_quota(peer, amount):
            self._grant(holder, peer, amount)
            return
        others = sum(one.peer == peer for one in self._queue)
        if self._closing or others >= MAX_WAITING or amount + self.held_by(holder) > self.quota:
            timeout_s = 0.0
        waiter = _WaitingCharge(holder, peer, amount, weight)
        self._queue.append(waiter)
        self._grant_waiting()
        try:
            while not waiter.decided.is_set():
                if self._next_in_queue() is waiter:
                    make_room()
                if timeout_s <= 0 or waiter.decided.is_set():
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(timeout_s, MAKE_ROOM_PERIOD_S)):
                        await waiter.decided.wait()
                timeout_s -= MAKE_ROOM_PERIOD_S
        except BaseException:
            if waiter.granted:
                self._take_back(holder, amount)
            raise
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)
                self._grant_waiting()
        if not waiter.granted:
            raise self._full(peer, amount)

    def release(self, holder: Hashable) -> None:
        """Free all that a holder has, and end its waiting."""
        for waiter in [waiter for waiter in self._queue if waiter.holder == holder]:
            self._queue.remove(waiter)
            waiter.decide(False)
        self._take_back(holder, self.held_by(holder))

    def refuse_waiting(self) -> None:
        """From now on no charge waits, and those that do fail with `CacheFull`."""
        self._closing = True
        for waiter in self._queue:
            waiter.decide(False)
        self._queue.clear()

    def _within_quota(self, peer: str, amount: int) -> bool:
        return self._peers[peer] + amount <= self.quota

    def _next_in_queue(self) -> _WaitingCharge | None:
        """The charge to grant next. One that would exceed its peer's quota does not hold up the others."""
        line = [one for one in self._queue if self._within_quota(one.peer, one.amount)]
        return min(line, key=lambda one: (self._peers[one.peer] / one.weight, -one.weight), default=None)

    def _grant_waiting(self) -> None:
        """Grant the waiting charges that fit."""
        while (first := self._next_in_queue()) is not None and first.amount <= self.free:
            self._queue.remove(first)
            self._grant(first.holder, first.peer, first.amount)
            first.decide(True)

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
        self._grant_waiting()

    def _full(self, peer: str, amount: int) -> CacheFull:
        others = f", {len(self._queue)} others wait" if self._queue else ""
        text = self._kind.amount
        return self._kind.error(
            f"{text(amount)} {self._kind.name} are needed and {text(max(0, self.free))} of {text(self.capacity)} are "
            f"free{others}; this peer holds {text(self._peers[peer])} of the {text(self.quota)} that one peer may "
            f"have. {self._kind.advice}"
        )


@dataclass(frozen=True)
class HeldCache(Generic[S]):
    """Cache that a session has.

    Attributes:
        session: which one.
        peer: its client.
        tokens: what it holds.
        idle_s: seconds since anything came for it; 0 while something is coming or being computed.
    """

    session: S
    peer: str
    tokens: int
    idle_s: float


def choose_leaving(held: Sequence[HeldCache[S]], peer: str, needed: int, wanted: int, kept: float) -> list[S]:
    """The sessions to ask to leave when `peer` needs cache, or none if that would not be enough. Pure.

    A session that is asked to leave loses only time: its client keeps all that it has sent, and replays it elsewhere.
    Sessions are asked in this order:

    1. Idle sessions, the longest idle first.
    2. If the asking peer stays within what every peer keeps: sessions of peers that hold more, the longest idle first.

    Args:
        held: what sessions hold, without the one that needs more.
        needed: tokens to be made free.
        wanted: tokens that the peer will hold then.
        kept: tokens that each peer keeps when others want them.
    """
    if needed <= 0:
        return []
    totals = Counter[str]()
    for one in held:
        totals[one.peer] += one.tokens
    chosen: dict[S, None] = {}
    by_idleness = sorted((one for one in held if one.tokens), key=lambda one: -one.idle_s)
    for only_idle in (True, False):
        for one in by_idleness:
            is_on_loan = wanted <= kept < totals[one.peer] and one.peer != peer
            if one.session in chosen or not (one.idle_s > IDLE_AFTER_S if only_idle else is_on_loan):
                continue
            chosen[one.session] = None
            totals[one.peer] -= one.tokens
            needed -= one.tokens
            if needed <= 0:
                return list(chosen)
    return []
