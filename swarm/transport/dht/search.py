"""Which node of the DHT a search asks next. Pure: it sends nothing and knows no clock.

A search asks, for each target, the nodes nearest to it (as Kademlia does), and learns of nearer ones from the answers.
Answers may be lies. So the nodes that this peer already knew are always asked, whatever the answers say. Each node may
name only a few others for each target. Once a node has named several nodes that do not answer, the names it gives are
ignored. Otherwise liars could fill the neighborhood of every target with nodes that do not exist.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hivemind.p2p import PeerID

from swarm.transport.dht.routing_table import BUCKET_NODES, node_id_of, position

MAX_TARGETS = 16
"""Targets of one request."""

MAX_NAMED = 256
"""How many nodes named by others, and not asked yet, are kept for one target: the nearest ones."""

MAX_ASKED = 128
"""How many nodes named by others are asked for one target. Without liars, about thirty are, in a swarm of thousands."""

MAX_FALSE_NAMES = 5
"""After a node has named this many nodes that do not answer, the names it gives are ignored."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to ask one node for."""

    peer: PeerID
    targets: tuple[bytes, ...]


@dataclass(slots=True)
class _Node:
    own: bool
    targets: set[bytes] = field(default_factory=set)
    """For which it was named."""
    named_by: set[PeerID] = field(default_factory=set)
    failed: bool = False
    answered: bool = False
    asked: set[bytes] = field(default_factory=set)


class _Neighborhood:
    """The nodes that are known for one target, by their distance.

    Attributes:
        nearest: all of them.
        own: those that this peer knew by itself: looking for them among all takes long.
        waiting: those that others named and that were not asked yet.
        asked: how many that others named were asked.
    """

    def __init__(self, target: bytes) -> None:
        self._place = position(target)
        self.nearest: list[tuple[int, PeerID]] = []
        self.own: list[tuple[int, PeerID]] = []
        self.waiting: set[PeerID] = set()
        self.asked = 0

    def add_own(self, peer: PeerID) -> None:
        """This peer knew a node by itself."""
        bisect.insort(self.own, self._insert(peer), key=_distance_of)

    def add_named(self, peer: PeerID) -> PeerID | None:
        """Another node named a new one. Returns which node is known no longer, if any."""
        self._insert(peer)
        self.waiting.add(peer)
        if len(self.waiting) <= MAX_NAMED:
            return None
        last = next(index for index in reversed(range(len(self.nearest))) if self.nearest[index][1] in self.waiting)
        _, dropped = self.nearest.pop(last)
        self.waiting.discard(dropped)
        return dropped

    def note_asked(self, peer: PeerID) -> None:
        """A node is asked for this target."""
        if peer in self.waiting:
            self.waiting.discard(peer)
            self.asked += 1

    def _insert(self, peer: PeerID) -> tuple[int, PeerID]:
        found = position(node_id_of(peer)) ^ self._place, peer
        bisect.insort(self.nearest, found, key=_distance_of)
        return found


def _distance_of(known: tuple[int, PeerID]) -> int:
    return known[0]


class Search:
    """One search for several targets.

    Args:
        targets: what is looked for.
        known: nodes that this peer already knows.
        breadth: how many of the nodes nearest to each target are asked.
        own: this peer, which is never asked.
        is_silent: whether a node has failed before and should not be asked, even if an answer names it.
    """

    def __init__(
        self,
        targets: Collection[bytes],
        known: Iterable[PeerID],
        breadth: int,
        own: PeerID,
        is_silent: Callable[[PeerID], bool] = lambda peer: False,
    ) -> None:
        self._breadth = breadth
        self._own = own
        self._is_silent = is_silent
        self._nodes: dict[PeerID, _Node] = {}
        self._false_names: Counter[PeerID] = Counter()
        self._planned: list[Request] | None = None
        self._wanted_for: dict[bytes, list[PeerID]] = {}
        """`_wanted` of the targets for which nothing has changed since; to find it out takes longest of all."""
        self._near = {target: _Neighborhood(target) for target in targets}
        for peer in known:
            if peer != own and peer not in self._nodes:
                self._nodes[peer] = _Node(own=True)
                for near in self._near.values():
                    near.add_own(peer)

    def next_request(self) -> Request | None:
        """The request to send next; None if the search has to wait for an answer, or is done."""
        if self._planned is None:
            self._planned = self._plan()
        if not self._planned:
            return None
        request = self._planned.pop()
        self._nodes[request.peer].asked.update(request.targets)
        for target in request.targets:
            self._near[target].note_asked(request.peer)
            self._wanted_for.pop(target, None)
        return request

    def answered(self, request: Request, neighbors: Mapping[bytes, Sequence[PeerID]]) -> None:
        """A node answered, and named other nodes for some of the targets."""
        node = self._nodes[request.peer]
        if not self._is_credible(node):
            self._wanted_for.clear()
        node.answered = True
        for target in request.targets:
            for peer in neighbors.get(target, ())[:BUCKET_NODES]:
                if peer != self._own:
                    self._learn(target, peer, request.peer)

    def failed(self, request: Request) -> None:
        """A node did not answer, or wrongly."""
        node = self._nodes[request.peer]
        node.failed = True
        self._planned = None
        self._wanted_for.clear()
        if not node.own:
            self._false_names.update(node.named_by)

    def nearest(self, target: bytes, count: int) -> list[PeerID]:
        """The nodes nearest to `target` that answered, nearest first."""
        nodes, order = self._nodes, self._near[target].nearest
        return list(islice((peer for _, peer in order if nodes[peer].answered and not nodes[peer].failed), count))

    @property
    def any_answered(self) -> bool:
        return any(node.answered for node in self._nodes.values())

    def _plan(self) -> list[Request]:
        """What to ask if nothing new is learned, last first: nodes known before, then those near most targets."""
        wanted: dict[PeerID, list[bytes]] = {}
        for target in self._near:
            if target not in self._wanted_for:
                self._wanted_for[target] = self._wanted(target)
            for peer in self._wanted_for[target]:
                wanted.setdefault(peer, []).append(target)
        return [
            Request(peer, tuple(wanted[peer][first : first + MAX_TARGETS]))
            for peer in sorted(wanted, key=lambda peer: (self._nodes[peer].own, len(wanted[peer])))
            for first in range(0, len(wanted[peer]), MAX_TARGETS)
        ]

    def _wanted(self, target: bytes) -> list[PeerID]:
        """The nodes to ask for the target now: of the nearest ones, and of the nearest that were known before."""
        nodes, near = self._nodes, self._near[target]
        worth = (peer for _, peer in near.nearest if self._is_worth_asking(nodes[peer]))
        own = (peer for _, peer in near.own if not nodes[peer].failed)
        others = self._breadth if near.asked < MAX_ASKED else 0
        chosen = dict.fromkeys((*islice(worth, others), *islice(own, self._breadth)))
        return [peer for peer in chosen if target not in nodes[peer].asked]

    def _is_worth_asking(self, node: _Node) -> bool:
        return not node.failed and self._is_credible(node)

    def _is_credible(self, node: _Node) -> bool:
        return node.own or node.answered or any(self._false_names[one] < MAX_FALSE_NAMES for one in node.named_by)

    def _learn(self, target: bytes, peer: PeerID, named_by: PeerID) -> None:
        node = self._nodes.get(peer)
        if node is None:
            if self._is_silent(peer):
                return
            node = self._nodes[peer] = _Node(own=False)
        if node.own:
            return
        node.named_by.add(named_by)
        if target in node.targets:
            return
        node.targets.add(target)
        self._planned = None
        self._wanted_for.pop(target, None)
        if (dropped := self._near[target].add_named(peer)) is not None:
            self._nodes[dropped].targets.discard(target)
            if not self._nodes[dropped].targets:
                del self._nodes[dropped]
