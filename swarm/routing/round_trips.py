"""The client's own measurements of how far away servers are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

NEWEST = 0.5
"""Weight of the newest measurement in the running mean: one slow answer is not believed at once, two are."""

STALE = 300.0
"""Seconds after which a measurement should be repeated. Ways through the Internet rarely change faster."""


class RoundTrips:
    """Running means of measured round trips. All times are seconds of one clock that the caller reads.

    Args:
        max_peers: how many peers are remembered; the one measured longest ago is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self.max_peers = max_peers
        self._seconds: dict[str, float] = {}
        self._measured: OrderedDict[str, float] = OrderedDict()

    def measured(self, peer_id: str, seconds: float, now: float) -> None:
        """Note a measured round trip of `seconds`."""
        known = self._seconds.get(peer_id, seconds)
        self._seconds[peer_id] = known + NEWEST * (seconds - known)
        self._measured[peer_id] = now
        self._measured.move_to_end(peer_id)
        while len(self._measured) > self.max_peers:
            oldest, _ = self._measured.popitem(last=False)
            del self._seconds[oldest]

    def seconds(self) -> Mapping[str, float]:
        """Peer id -> round trip, as known now."""
        return dict(self._seconds)

    def is_fresh(self, peer_id: str, now: float) -> bool:
        """Whether the peer was measured lately."""
        return now - self._measured.get(peer_id, float("-inf")) < STALE
