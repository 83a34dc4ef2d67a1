"""Averages of measured round trips to other peers, for clients and servers. Pure: the caller passes the time in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _AveragedRoundTrip:
    seconds: float
    when: float


class RoundTrips:
    """Exponentially weighted averages of measured round trips.

    Args:
        weight: weight of a new measurement; the previous average has the rest.
        lifetime: seconds after which a measurement expires.
        max_peers: number of peers that are kept; the one measured longest ago is forgotten first.
        fresh: seconds during which a measurement need not be repeated. Routes on the Internet rarely change faster.
    """

    def __init__(
        self, weight: float = 0.3, lifetime: float = 600.0, max_peers: int = 4096, fresh: float = 300.0
    ) -> None:
        self._weight = weight
        self._lifetime = lifetime
        self._fresh = fresh
        self._max_peers = max_peers
        self._averages: dict[str, _AveragedRoundTrip] = {}  # the one measured longest ago first

    def __len__(self) -> int:
        return len(self._averages)

    def record(self, peer_id: str, seconds: float, now: float) -> None:
        """Record a measurement. Raises `ValueError` if it is negative, infinite or NaN."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{seconds} is not a valid round trip: expected a finite number of seconds >= 0")
        known = self.get(peer_id, now)
        if known is not None:
            average = known + self._weight * (seconds - known)
            # Rounding must not carry the average outside what was measured.
            seconds = min(max(average, min(known, seconds)), max(known, seconds))
        self._averages.pop(peer_id, None)
        self._averages[peer_id] = _AveragedRoundTrip(seconds, now)
        self._drop_expired(now)

    def get(self, peer_id: str, now: float) -> float | None:
        """Average round trip to the peer in seconds, or None if it was not measured recently."""
        known = self._averages.get(peer_id)
        return known.seconds if known is not None and now - known.when <= self._lifetime else None

    def recent(self, now: float) -> dict[str, float]:
        """Peer id -> average round trip in seconds, for all peers that were measured recently."""
        return {
            peer: average.seconds for peer, average in self._averages.items() if now - average.when <= self._lifetime
        }

    def is_fresh(self, peer_id: str, now: float) -> bool:
        """Whether the last measurement is too recent to be worth repeating."""
        known = self._averages.get(peer_id)
        return known is not None and now - known.when < self._fresh

    def forget(self, peer_id: str) -> None:
        """Drop all measurements of the peer."""
        self._averages.pop(peer_id, None)

    def _drop_expired(self, now: float) -> None:
        while self._averages:
            oldest = next(iter(self._averages))
            if len(self._averages) <= self._max_peers and now - self._averages[oldest].when <= self._lifetime:
                break
            del self._averages[oldest]
