"""How often clients may make a server dial other peers: once for each link that they ask for (`SetNeighbors`).

A client may name any peer id. To reach one that it has never heard of, this peer's daemon asks others for addresses and
tries them, which costs everybody far more than the message that asks for it. A stream to a peer that was reached before
costs little. The daemon dials peer ids only, never an address that a client chose.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MAX_PENDING = 64
MAX_PENDING_OF_CLIENT = 16
"""Dials that have not succeeded or failed yet: of all clients, and of one."""

BURST = 64.0
PER_S = 1.0
"""Unknown peers that a client may name at once, and then every second."""

KNOWN_COST = 1 / 16
"""What a peer that was reached lately costs, in unknown ones. A client may have 256 sessions, each with one link."""

KNOWN_S = 600.0
"""How long a peer that was reached counts as known."""

MAX_REMEMBERED = 4096
"""Clients and peers that are remembered; those that were not used for longest are forgotten first."""


@dataclass
class _Account:
    """What a client has left, as of a time."""

    left: float
    time: float


class DialBudget:
    """Counts the dials of one server. All times are seconds of one clock, passed in by the caller."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._reached: OrderedDict[str, float] = OrderedDict()
        self._pending: Counter[str] = Counter()

    def begin(self, client: str, peer_id: str, now: float) -> Dial | None:
        """A dial for `client`, which has to be ended; None if it has none left for now, or names itself."""
        if peer_id == client or self._pending.total() >= MAX_PENDING or self._pending[client] >= MAX_PENDING_OF_CLIENT:
            return None
        account = self._accounts.pop(client, None) or _Account(BURST, now)
        account.left = min(BURST, account.left + (now - account.time) * PER_S)
        account.time = now
        _remember(self._accounts, client, account)
        cost = KNOWN_COST if now - self._reached.get(peer_id, -KNOWN_S) < KNOWN_S else 1.0
        if account.left < cost:
            return None
        account.left -= cost
        self._pending[client] += 1
        return Dial(self, client, peer_id)

    def end(self, client: str, peer_id: str, reached_at: float | None) -> None:
        """A dial has ended: it reached the peer at a time, or did not (None)."""
        self._pending[client] -= 1
        if self._pending[client] <= 0:
            del self._pending[client]
        if reached_at is not None:
            self._reached.pop(peer_id, None)
            _remember(self._reached, peer_id, reached_at)


class Dial:
    """One dial that was begun; `end` it once, whatever comes of it."""

    def __init__(self, budget: DialBudget, client: str, peer_id: str) -> None:
        self._budget: DialBudget | None = budget
        self._client = client
        self._peer_id = peer_id

    def end(self, reached_at: float | None = None) -> None:
        """The peer was reached at a time, or not at all (None). Only the first call counts."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.end(self._client, self._peer_id, reached_at)


def _remember(table: OrderedDict[str, T], key: str, value: T) -> None:
    table[key] = value
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
