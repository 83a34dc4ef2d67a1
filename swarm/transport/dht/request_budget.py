"""How much peers may ask of a node of the DHT: budgets that refill with time. Pure: the caller passes time in."""

from __future__ import annotations

from swarm.common.token_buckets import TokenBuckets

BURST = 512.0
"""Units that a peer may use at once. A request is one, and so is each record that it brings, whose signature has to be
verified, and each `ANSWER_UNIT_BYTES` of an answer."""

REFILL_PER_S = 64.0
ANSWER_UNIT_BYTES = 64 * 1024
MAX_PEERS = 4096
"""Peers whose use is remembered; the one that has asked nothing for longest is forgotten first."""

CHECK_BURST = 2048.0
CHECKS_PER_S = 256.0
"""Records whose signature a node verifies for others at once, and then every second: about 2 % of a processor's time.
Servers have two records a minute to be verified at each of 8 nodes."""

RESERVED_SHARE = 0.5
"""Share of these that only owners who are no newcomers may use."""


class RequestBudget:
    """What each peer may still ask. All times are seconds of one clock."""

    def __init__(self, burst: float = BURST, refill_per_s: float = REFILL_PER_S, max_peers: int = MAX_PEERS) -> None:
        self._budgets = TokenBuckets[bytes](burst, refill_per_s, max_peers)

    def allows(self, peer: bytes, now: float, records: int = 0) -> bool:
        """Whether the peer may ask; if so, its request is charged, with the records that it wants stored.

        They may take the budget below zero.
        """
        if self._budgets.left(peer, now) < 1.0:
            return False
        self._budgets.take(peer, 1.0 + records, now)
        return True

    def charge_answer(self, peer: bytes, length: int, now: float) -> None:
        """Charge an answer of `length` bytes; it may take the budget below zero."""
        self._budgets.take(peer, length / ANSWER_UNIT_BYTES, now)


class CheckBudget:
    """How many records a node verifies for all peers together: somebody may have any number of identities."""

    def __init__(self, burst: float = CHECK_BURST, refill_per_s: float = CHECKS_PER_S) -> None:
        self._reserved = burst * RESERVED_SHARE
        self._left = TokenBuckets[None](burst, refill_per_s, 1)

    def allows(self, now: float, is_established: bool) -> bool:
        """Whether another record may be verified; if so, it is charged.

        Args:
            is_established: whether its owner has long been there.
        """
        if self._left.left(None, now) - 1.0 < (0.0 if is_established else self._reserved):
            return False
        self._left.take(None, 1.0, now)
        return True
