"""How often clients may make a server dial other peers: once for each link that they ask for (`SetNeighbors`).

A client may name any peer id. To reach one that it has never heard of, this peer's daemon asks others for addresses and
tries them, which costs everybody far more than the message that asks for it. A stream to a peer that this one knows, or
that it is dialing already, costs little: such dials count for little, and take no place among those that are pending.
The daemon dials peer ids only, never an address that a client chose.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm.common.token_buckets import TokenBuckets

MAX_PENDING = 64
MAX_PENDING_OF_CLIENT = 16
"""Unknown peers that are being dialed at a time: for all clients, and for one."""

BURST = 64.0
PER_S = 1.0
"""Unknown peers that a client may name at once, and then every second."""

KNOWN_COST = 1 / 16
"""What a peer costs that is known, or being dialed for this client, in unknown ones. A client may have 256 sessions,
each with one link: a gateway opens them all anew, to a few servers, when a server before those leaves."""

KNOWN_S = 600.0
"""How long a peer that was reached counts as known, if dialing it does not fail before."""

MAX_REMEMBERED = 4096
"""Clients and peers that are remembered; those that were not used for longest are forgotten first."""


class DialBudget:
    """Counts the dials of one server. All times are seconds of one clock, passed in by the caller.

    Args:
        is_known: whether this peer knows another one anyway, from the DHT.
    """

    def __init__(self, is_known: Callable[[str], bool] = lambda peer_id: False) -> None:
        self._is_known = is_known
        self._accounts = TokenBuckets[str](BURST, PER_S, MAX_REMEMBERED)
        self._reached: OrderedDict[str, float] = OrderedDict()
        self._pending: dict[str, Counter[str]] = {}
        """For each client, its dials to each peer that was unknown."""

    def begin(self, client: str, peer_id: str, now: float) -> Dial | None:
        """A dial for `client`, which has to be ended; None if it has none left for now, or names itself."""
        if peer_id == client:
            return None
        is_known = now - self._reached.get(peer_id, -KNOWN_S) < KNOWN_S or self._is_known(peer_id)
        own = self._pending.get(client) or Counter[str]()
        is_cheap = is_known or peer_id in own
        if not is_cheap and (len(own) >= MAX_PENDING_OF_CLIENT or self._pending_in_all() >= MAX_PENDING):
            return None
        cost = KNOWN_COST if is_cheap else 1.0
        has_enough = self._accounts.left(client, now) >= cost
        self._accounts.take(client, cost if has_enough else 0.0, now)
        if not has_enough:
            return None
        if not is_known:
            self._pending.setdefault(client, Counter())[peer_id] += 1
        return Dial(self, client, peer_id, is_pending=not is_known)

    def end_pending(self, client: str, peer_id: str) -> None:
        """A dial to a peer that was unknown has ended."""
        own = self._pending[client]
        own[peer_id] -= 1
        if not own[peer_id]:
            del own[peer_id]
        if not own:
            del self._pending[client]

    def note_reached(self, peer_id: str, now: float) -> None:
        """A dial has reached the peer."""
        self._reached[peer_id] = now
        self._reached.move_to_end(peer_id)
        if len(self._reached) > MAX_REMEMBERED:
            self._reached.popitem(last=False)

    def note_failed(self, peer_id: str) -> None:
        """The peer cannot be reached, so that it is known no longer. Otherwise a client could have many dialed that it
        has taken away meanwhile."""
        self._reached.pop(peer_id, None)

    def _pending_in_all(self) -> int:
        return sum(map(len, self._pending.values()))


class Dial:
    """One dial that was begun. It has to end once, whatever comes of it; only the first end counts."""

    def __init__(self, budget: DialBudget, client: str, peer_id: str, is_pending: bool) -> None:
        self._budget: DialBudget | None = budget
        self._client = client
        self._peer_id = peer_id
        self._is_pending = is_pending

    def reached(self, now: float) -> None:
        """The peer was reached."""
        if (budget := self._end()) is not None:
            budget.note_reached(self._peer_id, now)

    def failed(self) -> None:
        """The peer cannot be reached."""
        if (budget := self._end()) is not None:
            budget.note_failed(self._peer_id)

    def give_up(self) -> None:
        """The result is no longer needed."""
        self._end()

    def _end(self) -> DialBudget | None:
        """The budget, at the first call."""
        budget, self._budget = self._budget, None
        if budget is not None and self._is_pending:
            budget.end_pending(self._client, self._peer_id)
        return budget
