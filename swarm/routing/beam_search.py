"""The route of least expected time, found fast: beam search over block boundaries (Petals, section 3.2).

Travel depends on pairs of servers, so an exact search has to look at all pairs at every boundary, a million of them for
each block of a large swarm. Here every server that holds the block keeps its best way of having computed it, which
costs nothing; but only the servers of the beam are tried as the ones that a step leaves. With a beam as wide as the
swarm the search is exact, and equal to `swarm.routing.shortest_path`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from swarm.data_structures import Route, Span
from swarm.routing.cost_model import CostModel, Demand, as_route, check_held
from swarm.routing.snapshot import Flags, Floats, Indices, Snapshot

WIDTH = 16
"""Servers that a step is tried to leave at a boundary, and as many of those whose span ends there."""


class _Boundary(NamedTuple):
    """Who computed the block before a boundary: `origins[k]`, if `targets[k]` computes the one behind it."""

    targets: Indices
    origins: Indices


def find_route(snapshot: Snapshot, wanted: Span, demand: Demand | None = None, *, width: int = WIDTH) -> Route:
    """A route over `wanted` of (nearly) the least `route_seconds`.

    Args:
        snapshot: the swarm.
        wanted: blocks to compute. A server may be entered and left in the middle of its span, and used twice.
        demand: what the route is for; by default one token from the client and back.
        width: see `WIDTH`.

    Raises:
        MissingBlocks: no usable server holds some of the blocks; all of those are named.
    """
    costs = CostModel(snapshot, demand or Demand())
    check_held(costs, wanted)
    holders = costs.holders(wanted.start)
    # spent[i]: seconds of the best way to have computed all blocks so far, the last of them by server i.
    spent = np.full(len(snapshot), np.inf)
    spent[holders] = costs.arrive(holders) + costs.enter[holders] + costs.block[holders]
    came_from: list[_Boundary] = []
    for block in range(wanted.start + 1, wanted.end):
        sources = _beam(spent, holders, snapshot.ends[holders] == block, width)
        holders = costs.holders(block)
        arrived, origins = _switch(costs, spent, sources, holders)
        stayed = spent[holders]
        stays = stayed <= arrived
        spent = np.full(len(snapshot), np.inf)
        spent[holders] = np.where(stays, stayed, arrived) + costs.block[holders]
        came_from.append(_Boundary(holders, np.where(stays, holders, origins)))
    last = int(holders[np.argmin(spent[holders] + costs.leave(holders))])
    return as_route(snapshot, wanted, _walk_back(came_from, last))


def _beam(spent: Floats, holders: Indices, ending: Flags, width: int) -> Indices:
    """The servers worth leaving: the `width` cheapest, and as many of those that have to be left here."""
    return np.union1d(_cheapest(spent, holders, width), _cheapest(spent, holders[ending], width))


def _cheapest(spent: Floats, servers: Indices, width: int) -> Indices:
    if len(servers) <= width:
        return servers
    return servers[np.argpartition(spent[servers], width)[:width]]


def _switch(costs: CostModel, spent: Floats, sources: Indices, targets: Indices) -> tuple[Floats, Indices]:
    """Least seconds until each target begins to compute, coming from a source; and that source, [targets] each."""
    through = spent[sources][:, None] + costs.travel(sources, targets)
    best = np.argmin(through, axis=0)
    return through[best, np.arange(len(targets))] + costs.enter[targets], sources[best]


def _walk_back(boundaries: list[_Boundary], last: int) -> list[int]:
    """The server of each block, first to last."""
    servers = [last]
    for boundary in reversed(boundaries):
        servers.append(int(boundary.origins[np.searchsorted(boundary.targets, servers[-1])]))
    return servers[::-1]
