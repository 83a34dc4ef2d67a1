"""Which node of the DHT a search asks next. Pure: it sends nothing and knows no clock.

A search asks, for each target, the nodes nearest to it (as Kademlia does), and learns of nearer ones from the answers.
An answer may lie. So the nodes that this peer knew by itself are always asked, whatever others say; a node names only a
few others for each target; and of a node that named several which did not answer, nothing more is believed. Otherwise
one liar could fill the neighborhood of every target with nodes that are not there.
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

MAX_NODES = 2048
"""Nodes that one search learns of."""

MAX_NODES_OF_ONE = 256
"""Of these, as many as one node may name: more than an honest one knows, and too few to leave no room for others."""

MAX_FALSE_NAMES = 5
"""A node may name so many others that do not answer, before it is not believed any more."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to ask one node for."""

    peer: PeerID
    targets: tuple[bytes, ...]


@dataclass(slots=True)
class _Node:
    own: bool
    named_by: set[PeerID] = field(default_factory=set)
    failed: bool = False
    answered: bool = False
    asked: set[bytes] = field(default_factory=set)


class Search:
    """One search for several targets.

    Args:
        targets: what is looked for.
        known: nodes that this peer knows by itself.
        breadth: for each target, so many of the nearest nodes are asked.
        own: this peer, which is never asked.
        is_silent: whether a node has failed before and should not be asked, whoever names it.
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
        self._new_names: Counter[PeerID] = Counter()
        self._planned: list[Request] | None = None
        self._nearest: dict[bytes, list[tuple[int, PeerID]]] = {target: [] for target in targets}
        """For each target, the known nodes by their distance."""
        self._own_nearest: dict[bytes, list[tuple[int, PeerID]]] = {target: [] for target in targets}
        """For each target, those of them that this peer knew by itself: looking for them among all takes long."""
        for peer in known:
            self._learn(peer, None)

    def next_request(self) -> Request | None:
        """The request to send next; None if there is none until another one is answered, or at all."""
        if self._planned is None:
            self._planned = self._plan()
        if not self._planned:
            return None
        request = self._planned.pop()
        self._nodes[request.peer].asked.update(request.targets)
        return request

    def answered(self, request: Request, neighbors: Mapping[bytes, Sequence[PeerID]]) -> None:
        """A node answered, and named other nodes for some of the targets."""
        node = self._nodes[request.peer]
        node.answered = True
        for target in request.targets:
            for peer in list(neighbors.get(target, ()))[:BUCKET_NODES]:
                self._learn(peer, request.peer)

    def failed(self, request: Request) -> None:
        """A node did not answer, or wrongly."""
        node = self._nodes[request.peer]
        node.failed = True
        self._planned = None
        if not node.own:
            self._false_names.update(node.named_by)

    def nearest(self, target: bytes, count: int) -> list[PeerID]:
        """The nodes nearest to `target` that answered, nearest first."""
        found = (
            peer for _, peer in self._nearest[target] if self._nodes[peer].answered and not self._nodes[peer].failed
        )
        return [peer for _, peer in zip(range(count), found, strict=False)]

    @property
    def any_answered(self) -> bool:
        return any(node.answered for node in self._nodes.values())

    def _plan(self) -> list[Request]:
        """What to ask if nothing new is learned, last first: nodes of our own, then those that may know most."""
        wanted: dict[PeerID, list[bytes]] = {}
        for target in self._nearest:
            for peer in self._wanted(target):
                wanted.setdefault(peer, []).append(target)
        return [
            Request(peer, tuple(wanted[peer][first : first + MAX_TARGETS]))
            for peer in sorted(wanted, key=lambda peer: (self._nodes[peer].own, len(wanted[peer])))
            for first in range(0, len(wanted[peer]), MAX_TARGETS)
        ]

    def _wanted(self, target: bytes) -> list[PeerID]:
        """The nodes that should be asked for the target now: of the nearest ones, and of the nearest of our own."""
        nodes = self._nodes
        nearest = (peer for _, peer in self._nearest[target] if self._is_worth_asking(nodes[peer]))
        own = (peer for _, peer in self._own_nearest[target] if not nodes[peer].failed)
        chosen = dict.fromkeys((*islice(nearest, self._breadth), *islice(own, self._breadth)))
        return [peer for peer in chosen if target not in nodes[peer].asked]

    def _is_worth_asking(self, node: _Node) -> bool:
        return not node.failed and self._is_credible(node)

    def _is_credible(self, node: _Node) -> bool:
        return node.own or node.answered or any(self._false_names[one] < MAX_FALSE_NAMES for one in node.named_by)

    def _learn(self, peer: PeerID, named_by: PeerID | None) -> None:
        if peer == self._own:
            return
        node = self._nodes.get(peer)
        if node is None:
            if len(self._nodes) >= MAX_NODES or (named_by is not None and self._is_silent(peer)):
                return
            if named_by is not None:
                if self._new_names[named_by] >= MAX_NODES_OF_ONE:
                    return
                self._new_names[named_by] += 1
            node = self._nodes[peer] = _Node(own=named_by is None)
            self._planned = None
            place = position(node_id_of(peer))
            for orders in (self._nearest, self._own_nearest) if node.own else (self._nearest,):
                for target, order in orders.items():
                    bisect.insort(order, (place ^ position(target), peer), key=lambda pair: pair[0])
        if named_by is not None:
            node.named_by.add(named_by)
