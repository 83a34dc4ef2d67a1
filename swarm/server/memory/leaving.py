"""Which sessions are asked to leave when another one needs their cache. Pure.

A client keeps all that it has sent, and fills another server's cache with it, or this one's again later. So a session
that is asked to leave loses time, and nothing else. The peer that needs cache is the asking one. Sessions are asked to
leave in this order, and only if that makes enough room:

1. Idle sessions, the longest idle first. Those of a peer with more standing than the asking one may be idle longer.
2. If the asking peer stays within its share of the cache: sessions of peers that hold more than theirs, the longest
   idle first. What a peer holds beyond its share is on loan.
3. If the asking peer has full standing: sessions of peers with little, the longest idle first.

A peer's share grows with its standing. So a new peer may use an empty server like any other, but peers that have been
served for long find room, however many new identities there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

IDLE_AFTER_S = 60.0
"""Seconds without a step after which a session gives way to any other."""

RESPECTED_IDLE_AFTER_S = 600.0
"""The same, if its peer has more standing than the one that needs the cache."""

LITTLE_STANDING = 0.25
"""Sessions of peers with less standing give way to peers of full standing, however little they hold."""


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


def choose_leaving(
    held: Sequence[HeldCache[S]],
    peer: str,
    needed: int,
    wanted: int,
    share: Callable[[str], float],
    standing: Callable[[str], float],
) -> list[S]:
    """The sessions to ask, or none if that would not be enough.

    Args:
        held: what sessions hold, without the one that needs more.
        needed: tokens to be made free.
        wanted: tokens that the peer will hold then.
        share: tokens that a peer keeps if others want them.
    """
    if needed <= 0:
        return []
    totals = Counter[str]()
    for one in held:
        totals[one.peer] += one.tokens
    own_standing, within_share = standing(peer), wanted <= share(peer)
    chosen: dict[S, None] = {}
    by_idleness = sorted((one for one in held if one.tokens), key=lambda one: -one.idle_s)

    def is_idle(one: HeldCache[S]) -> bool:
        respected = standing(one.peer) > own_standing
        return one.idle_s > (RESPECTED_IDLE_AFTER_S if respected else IDLE_AFTER_S)

    def is_on_loan(one: HeldCache[S]) -> bool:
        return within_share and one.peer != peer and totals[one.peer] > share(one.peer)

    def gives_way(one: HeldCache[S]) -> bool:
        return own_standing >= 1 and one.peer != peer and standing(one.peer) < LITTLE_STANDING

    for may_be_asked in (is_idle, is_on_loan, gives_way):
        for one in by_idleness:
            if needed <= 0:
                return list(chosen)
            if one.session not in chosen and may_be_asked(one):
                chosen[one.session] = None
                totals[one.peer] -= one.tokens
                needed -= one.tokens
    return list(chosen) if needed <= 0 else []
