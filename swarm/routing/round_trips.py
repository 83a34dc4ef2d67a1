"""How far away other peers are, from what was measured. Used by clients and servers. Pure: the clock is handed in."""

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
        weight: of a new measurement; what was known has the rest.
        lifetime: seconds after which a measurement counts no more, and the peer as unknown.
        limit: peers that are kept; the one measured longest ago is forgotten first.
        fresh: seconds for which a measurement need not be repeated. Ways through the Internet rarely change faster.
    """

    def __init__(self, weight: float = 0.3, lifetime: float = 600.0, limit: int = 4096, fresh: float = 300.0) -> None:
        self._weight = weight
        self._lifetime = lifetime
        self._fresh = fresh
        self._limit = limit
        self._averages: dict[str, _AveragedRoundTrip] = {}  # the one measured longest ago first

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, peer_id: str, seconds: float, now: float) -> None:
        """Take a measurement in. Raises `ValueError` for what is no time."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{seconds} is no round trip in seconds")
        known = self.get(peer_id, now)
        if known is not None:
            average = known + self._weight * (seconds - known)
            # Rounding must not carry the average outside what was measured.
            seconds = min(max(average, min(known, seconds)), max(known, seconds))
        self._averages.pop(peer_id, None)
        self._averages[peer_id] = _AveragedRoundTrip(seconds, now)
        self._forget_old(now)

    def get(self, peer_id: str, now: float) -> float | None:
        """Seconds to the peer, or None if they were not measured lately."""
        known = self._averages.get(peer_id)
        return known.seconds if known is not None and now - known.when <= self._lifetime else None

    def all(self, now: float) -> dict[str, float]:
        """Peer id -> seconds, of all peers that were measured lately."""
        return {
            peer: average.seconds for peer, average in self._averages.items() if now - average.when <= self._lifetime
        }

    def is_fresh(self, peer_id: str, now: float) -> bool:
        """Whether measuring the peer again would be of little use yet."""
        known = self._averages.get(peer_id)
        return known is not None and now - known.when < self._fresh

    def forget(self, peer_id: str) -> None:
        """As if the peer had never been measured."""
        self._averages.pop(peer_id, None)

    def _forget_old(self, now: float) -> None:
        while self._averages:
            oldest = next(iter(self._averages))
            if len(self._averages) <= self._limit and now - self._averages[oldest].when <= self._lifetime:
                break
            del self._averages[oldest]
