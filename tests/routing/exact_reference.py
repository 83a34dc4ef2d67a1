"""Finds the route of least expected time exactly: the reference implementation for `swarm.routing.beam_search`.

Dynamic programming over (block, server that computed it). It tries all pairs of servers at every block boundary, in
plain Python, so it is good for hundreds of servers.
"""

from __future__ import annotations

import numpy as np

from swarm.data_structures import Route, Span
from swarm.routing.cost_model import CostModel, RouteRequirements, raise_if_blocks_missing, route_of_servers
from swarm.routing.swarm_snapshot import SwarmSnapshot


def shortest_path(snapshot: SwarmSnapshot, span: Span, requirements: RouteRequirements | None = None) -> Route:
    """The route over `span` with the least `route_seconds`. Raises `MissingBlocks` for blocks without a server."""
    costs = CostModel(snapshot, requirements or RouteRequirements())
    raise_if_blocks_missing(costs, span)
    servers = np.arange(len(snapshot))
    travel = costs.travel_seconds(servers, servers).tolist()
    arrival_seconds, return_seconds = costs.arrival_seconds(servers).tolist(), costs.return_seconds(servers).tolist()
    server_seconds, compute = costs.server_seconds.tolist(), costs.block_seconds.tolist()

    # best[i]: least seconds for all blocks so far if server i computes the last one, and the server of each block.
    best = {i: (arrival_seconds[i] + server_seconds[i] + compute[i], [i]) for i in costs.holders(span.start).tolist()}
    for block in range(span.start + 1, span.end):
        following = {}
        for target in costs.holders(block).tolist():
            spent, source = min(
                (spent if source == target else spent + travel[source][target] + server_seconds[target], source)
                for source, (spent, _) in best.items()
            )
            following[target] = (spent + compute[target], [*best[source][1], target])
        best = following
    _, last = min((spent + return_seconds[i], i) for i, (spent, _) in best.items())
    return route_of_servers(snapshot, span, best[last][1])
