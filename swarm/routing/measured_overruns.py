"""How much longer servers take than they announce, as this client has measured it. Pure: the caller passes the time in.

What a client measures holds its own delays too, and those of a machine or a network that all share. So a server is
compared with the others that were measured: it is charged with what it takes beyond the one that overruns least. A
server that announces too much, or drips its answers, thereby loses the place that its announcement gave it; it gets
another chance as the measurement ages.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field

KEPT_STEPS = 8
"""Newest steps of a server, whose median counts: one that stalls for a moment is not slow."""

HALF_LIFE_S = 300.0
"""Seconds without a new step after which an overrun counts half."""

FORGET_AFTER_S = 3600.0
"""Seconds without a new step after which it does not count any more."""

MAX_OVERRUN_S = 10.0
"""Seconds for each block that a server is charged with at most."""


@dataclass
class _Overruns:
    when: float
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    @property
    def median(self) -> float:
        return statistics.median(self.steps)


class MeasuredOverruns:
    """Seconds that servers take for each block beyond what they announce. Times are seconds of the caller's clock.

    Args:
        max_peers: number of peers that are kept; the one measured longest ago is forgotten first.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._peers: OrderedDict[str, _Overruns] = OrderedDict()  # the one measured longest ago first

    def __len__(self) -> int:
        return len(self._peers)

    def record(self, peer_id: str, seconds: float, now: float) -> None:
        """A step took so many seconds a block longer than announced. Raises `ValueError` if they are not finite."""
        if not math.isfinite(seconds):
            raise ValueError(f"{seconds} is not a valid overrun: expected a finite number of seconds")
        known = self._peers.pop(peer_id, None) or _Overruns(now)
        known.when = now
        known.steps.append(min(max(seconds, 0.0), MAX_OVERRUN_S))
        self._peers[peer_id] = known
        while len(self._peers) > self._max_peers or now - next(iter(self._peers.values())).when > FORGET_AFTER_S:
            self._peers.popitem(last=False)

    def replace(self, peer_id: str, seconds: float, now: float) -> None:
        """Forget how the peer was before, and go on from this; see `record`."""
        self._peers.pop(peer_id, None)
        self.record(peer_id, seconds, now)

    def charges(self, now: float) -> dict[str, float]:
        """Peer id -> seconds >= 0 for each block that the peer is charged with."""
        medians = {
            peer_id: known.median for peer_id, known in self._peers.items() if now - known.when <= FORGET_AFTER_S
        }
        least, second = (*sorted(medians.values())[:2], 0.0, 0.0)[:2] if len(medians) > 1 else (0.0, 0.0)
        charged = {}
        for peer_id, median in medians.items():
            age = max(0.0, now - self._peers[peer_id].when)
            common = second if median == least else least
            charged[peer_id] = max(0.0, median - common) * 0.5 ** (age / HALF_LIFE_S)
        return charged
