"""How much one peer may ask of a node of the DHT: a budget that refills with time. Pure: the caller passes time in."""

from __future__ import annotations

from collections import OrderedDict

BURST = 512.0
"""Units that a peer may use at once. A request is one, and so is each record that it brings, whose signature has to be
verified, and each `ANSWER_UNIT_BYTES` of an answer."""

REFILL_PER_S = 64.0
ANSWER_UNIT_BYTES = 64 * 1024
MAX_PEERS = 4096
"""Peers whose use is remembered; the one that has asked nothing for longest is forgotten first."""


class RequestLimits:
    """Budgets of the peers that ask. All times are seconds of one clock."""

    def __init__(self, burst: float = BURST, refill_per_s: float = REFILL_PER_S, max_peers: int = MAX_PEERS) -> None:
        self._burst = burst
        self._refill_per_s = refill_per_s
        self._max_peers = max_peers
        self._budgets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allows(self, peer: bytes, now: float, records: int = 0) -> bool:
        """Whether the peer may ask; if so, its request is charged, with the records that it wants stored.

        They may take the budget below zero.
        """
        left = self._left(peer, now)
        if left < 1.0:
            return False
        self._keep(peer, left - 1.0 - records, now)
        return True

    def charge_answer(self, peer: bytes, length: int, now: float) -> None:
        """Charge an answer of `length` bytes; it may take the budget below zero."""
        self._keep(peer, self._left(peer, now) - length / ANSWER_UNIT_BYTES, now)

    def _left(self, peer: bytes, now: float) -> float:
        left, when = self._budgets.get(peer, (self._burst, now))
        return min(self._burst, left + max(0.0, now - when) * self._refill_per_s)

    def _keep(self, peer: bytes, left: float, now: float) -> None:
        self._budgets[peer] = (left, now)
        self._budgets.move_to_end(peer)
        if len(self._budgets) > self._max_peers:
            self._budgets.popitem(last=False)
