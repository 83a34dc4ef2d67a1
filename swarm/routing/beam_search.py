"""The route of least expected time, found fast: beam search over block boundaries (Petals, section 3.2).

Travel depends on pairs of servers, so an exact search has to look at all pairs at every boundary, a million of them
for each block of a large swarm. But only few pairs were measured. Those announced ways are all tried. Where travel has
to be estimated, one server is left about as easily as another, and only the cheapest so far, the beam, are tried. And
each server that holds the block keeps its best way of having computed it, so staying is always possible. With a beam as
wide as the swarm the search is exact, and equal to `swarm.routing.shortest_path`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from swarm.data_structures import Route, Span
from swarm.routing.cost_model import CostModel, RouteRequirements, as_route, check_held
from swarm.routing.swarm_snapshot import Floats, Indices, SwarmSnapshot

WIDTH = 32
"""Servers of the beam. `python -m benchmarks.routing` shows what it costs and loses."""


class _BestArrivals(NamedTuple):
    """Who computed the block before a boundary: `origins[k]`, if `targets[k]` computes the one behind it."""

    targets: Indices
    origins: Indices


def find_route(
    snapshot: SwarmSnapshot, wanted: Span, demand: RouteRequirements | None = None, *, width: int = WIDTH
) -> Route:
    """A route over `wanted` of (nearly) the least `route_seconds`.

    Args:
        snapshot: the swarm.
        wanted: blocks to compute. A server may be entered and left in the middle of its span, and used twice.
        demand: what the route is for; by default one token from the client and back.
        width: see `WIDTH`.

    Raises:
        MissingBlocks: no usable server holds some of the blocks; all of those are named.
    """
    costs = CostModel(snapshot, demand or RouteRequirements())
    check_held(costs, wanted)
    holders = costs.holders(wanted.start)
    # spent[i]: seconds of the best way to have computed all blocks so far, the last of them by server i.
    spent = np.full(len(snapshot), np.inf)
    spent[holders] = costs.arrive(holders) + costs.enter[holders] + costs.block[holders]
    came_from: list[_BestArrivals] = []
    for block in range(wanted.start + 1, wanted.end):
        beam = _beam(spent, holders, width)
        holders = costs.holders(block)
        arrived, origins = _switch(costs, spent, beam, holders, block)
        stayed = spent[holders]
        stays = stayed <= arrived
        spent = np.full(len(snapshot), np.inf)
        spent[holders] = np.where(stays, stayed, arrived) + costs.block[holders]
        came_from.append(_BestArrivals(holders, np.where(stays, holders, origins)))
    last = int(holders[np.argmin(spent[holders] + costs.leave(holders))])
    return as_route(snapshot, wanted, _walk_back(came_from, last))


def _beam(spent: Floats, holders: Indices, width: int) -> Indices:
    """The servers worth leaving: the cheapest so far."""
    if len(holders) <= width:
        return holders
    return holders[np.argpartition(spent[holders], width)[:width]]


def _switch(costs: CostModel, spent: Floats, beam: Indices, targets: Indices, boundary: int) -> tuple[Floats, Indices]:
    """Least seconds until each target begins to compute, coming from another server, and which, [targets] each."""
    through = spent[beam][:, None] + costs.estimated_travel(beam, targets)  # [beam, targets]
    # Announced ways that can matter: those of the beam replace estimates, the others have to beat the worst of them.
    links = costs.snapshot.links
    at = links.at(boundary)
    left = spent[links.sources[at]]
    announced = left + links.seconds[at]
    useful = np.flatnonzero((left <= np.max(spent[beam])) | (announced <= np.max(np.min(through, axis=0))))
    announced, sources, ends = announced[useful], links.sources[at[useful]], links.targets[at[useful]]
    rows, columns = costs.places(beam)[sources], costs.places(targets)[ends]
    known = (rows >= 0) & (columns >= 0)
    through[rows[known], columns[known]] = announced[known]
    best = np.argmin(through, axis=0)
    origins = beam[best]
    arrived = np.full(len(spent), np.inf)
    arrived[targets] = through[best, np.arange(len(targets))]
    np.minimum.at(arrived, ends, announced)
    taken = (columns >= 0) & (announced == arrived[ends])
    origins[columns[taken]] = sources[taken]
    return arrived[targets] + costs.enter[targets], origins


def _walk_back(boundaries: list[_BestArrivals], last: int) -> list[int]:
    """The server of each block, first to last."""
    servers = [last]
    for boundary in reversed(boundaries):
        servers.append(int(boundary.origins[np.searchsorted(boundary.targets, servers[-1])]))
    return servers[::-1]
