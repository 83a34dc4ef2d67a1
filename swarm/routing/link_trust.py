"""Which servers a client lets push to each other: not two of which one has lied, if it could not tell which."""

from __future__ import annotations

from collections import OrderedDict

DISTRUST_S = 1800.0
"""How long two servers are kept apart."""

MAX_PARTNERS = 2
"""A server that was caught with this many others is no longer linked at all. An honest one that liars frame loses no
more than its links: this client passes its outputs on itself."""

PARTNER_PENALTY_S = 0.1
"""Cost added to a route for each server that a peer was caught with."""


class LinkTrust:
    """This client's record of links where one side lied. All times are seconds of one clock, passed in by the caller.

    Args:
        max_links: links that are remembered; the oldest is forgotten first.
    """

    def __init__(self, max_links: int = 4096) -> None:
        self._max_links = max_links
        self._until: OrderedDict[frozenset[str], float] = OrderedDict()

    def distrust(self, one: str, other: str, now: float) -> None:
        """One of two servers lied about what passed between them."""
        pair = frozenset((one, other))
        self._until.pop(pair, None)
        self._until[pair] = now + DISTRUST_S
        while len(self._until) > self._max_links:
            self._until.popitem(last=False)

    def trusts(self, one: str, other: str, now: float) -> bool:
        """Whether one of two servers may push to the other."""
        if not self._until:
            return True
        caught = self._partners(now)
        return other not in caught.get(one, ()) and all(
            len(caught.get(peer, ())) < MAX_PARTNERS for peer in (one, other)
        )

    def penalties(self, now: float) -> dict[str, float]:
        """Peer id -> seconds to add to the cost of using the peer."""
        return {peer: len(partners) * PARTNER_PENALTY_S for peer, partners in self._partners(now).items()}

    def _partners(self, now: float) -> dict[str, set[str]]:
        """Peer id -> the servers that it was caught with."""
        found: dict[str, set[str]] = {}
        for pair, until in self._until.items():
            if now < until:
                for peer in pair:
                    found.setdefault(peer, set()).update(pair - {peer})
        return found
