"""Finds a fast route: beam search over block boundaries for the least expected time (Petals, section 3.2).

Travel time depends on pairs of servers, so an exact search would look at all pairs at every block boundary: a million
of them for each block of a large swarm. But only few pairs were measured. All announced links are tried. Where the
travel time is only estimated, the servers differ little, so only the cheapest ones so far (the beam) are tried. Every
server that holds the block keeps its best path, so staying on a server is always possible. With a beam as wide as the
swarm the search is exact and equal to `tests.routing.exact_reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from swarm.data_structures import Route, Span
from swarm.routing.cost_model import CostModel, RouteRequirements, raise_if_blocks_missing, route_of_servers
from swarm.routing.swarm_snapshot import Floats, Indices, SwarmSnapshot

BEAM_WIDTH = 32
"""Number of servers in the beam. `python -m benchmarks.network.routing` shows its speed and how much it loses."""


class _BestArrivals(NamedTuple):
    """The best predecessors at a block boundary: `origins[k]` computes the block before it if `targets[k]` goes on."""

    targets: Indices
    origins: Indices


def find_route(
    snapshot: SwarmSnapshot, span: Span, requirements: RouteRequirements | None = None, *, beam_width: int = BEAM_WIDTH
) -> Route:
    """Find a route over `span` with (nearly) the least `route_seconds`.

    Args:
        snapshot: the swarm.
        span: the blocks to compute. A route may enter and leave a server in the middle of its span, and use it twice.
        requirements: what the route is for; by default one token from the client and back.
        beam_width: see `BEAM_WIDTH`.

    Raises:
        MissingBlocks: no usable server holds some of the blocks. The error names all of them.
    """
    costs = CostModel(snapshot, requirements or RouteRequirements())
    raise_if_blocks_missing(costs, span)
    holders = costs.holders(span.start)
    # spent[i]: seconds of the best path over all blocks so far on which server i computes the last of them.
    spent = np.full(len(snapshot), np.inf)
    spent[holders] = costs.arrival_seconds(holders) + costs.server_seconds[holders] + costs.block_seconds[holders]
    came_from: list[_BestArrivals] = []
    for block in range(span.start + 1, span.end):
        beam = _cheapest_servers(spent, holders, beam_width)
        holders = costs.holders(block)
        arrived, origins = _best_switches(costs, spent, beam, holders, block)
        stayed = spent[holders]
        stays = stayed <= arrived
        spent = np.full(len(snapshot), np.inf)
        spent[holders] = np.where(stays, stayed, arrived) + costs.block_seconds[holders]
        came_from.append(_BestArrivals(holders, np.where(stays, holders, origins)))
    last = int(holders[np.argmin(spent[holders] + costs.return_seconds(holders))])
    return route_of_servers(snapshot, span, _walk_back(came_from, last))


def _cheapest_servers(spent: Floats, holders: Indices, width: int) -> Indices:
    """The `width` servers that are cheapest so far."""
    if len(holders) <= width:
        return holders
    return holders[np.argpartition(spent[holders], width)[:width]]


def _best_switches(
    costs: CostModel, spent: Floats, beam: Indices, targets: Indices, boundary: int
) -> tuple[Floats, Indices]:
    """For each target: the least seconds until it begins to compute after a switch, and from which server."""
    through = spent[beam][:, None] + costs.estimated_travel_seconds(beam, targets)  # [beam, targets]
    # Announced links that can matter: those from the beam replace estimates, others have to beat the worst estimate.
    links = costs.snapshot.links
    at = links.at(boundary)
    left = spent[links.sources[at]]
    announced = left + costs.link_seconds[at]
    useful = np.flatnonzero((left <= np.max(spent[beam])) | (announced <= np.max(np.min(through, axis=0))))
    announced, sources, ends = announced[useful], links.sources[at[useful]], links.targets[at[useful]]
    rows, columns = costs.positions_in(beam)[sources], costs.positions_in(targets)[ends]
    known = (rows >= 0) & (columns >= 0)
    through[rows[known], columns[known]] = announced[known]
    best = np.argmin(through, axis=0)
    origins = beam[best]
    arrived = np.full(len(spent), np.inf)
    arrived[targets] = through[best, np.arange(len(targets))]
    np.minimum.at(arrived, ends, announced)
    taken = (columns >= 0) & (announced == arrived[ends])
    origins[columns[taken]] = sources[taken]
    return arrived[targets] + costs.server_seconds[targets], origins


def _walk_back(boundaries: list[_BestArrivals], last: int) -> list[int]:
    """The server of each block, from the first block to the last."""
    servers = [last]
    for boundary in reversed(boundaries):
        servers.append(int(boundary.origins[np.searchsorted(boundary.targets, servers[-1])]))
    return servers[::-1]
