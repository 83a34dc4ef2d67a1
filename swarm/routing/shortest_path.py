"""The route of least expected time, exactly and plainly: the reference beside `swarm.routing.beam_search`.

Dynamic programming over (block, server that computed it). All pairs of servers are tried at every boundary, in plain
Python: good for hundreds of servers.
"""

from __future__ import annotations

import numpy as np

from swarm.data_structures import Route, Span
from swarm.routing.cost_model import CostModel, RouteRequirements, as_route, check_held
from swarm.routing.swarm_snapshot import SwarmSnapshot


def shortest_path(snapshot: SwarmSnapshot, wanted: Span, demand: RouteRequirements | None = None) -> Route:
    """The route over `wanted` of least `route_seconds`. Raises `MissingBlocks` with the blocks that nobody holds."""
    costs = CostModel(snapshot, demand or RouteRequirements())
    check_held(costs, wanted)
    everyone = np.arange(len(snapshot))
    travel = costs.travel(everyone, everyone).tolist()
    arrive, leave = costs.arrive(everyone).tolist(), costs.leave(everyone).tolist()
    enter, compute = costs.enter.tolist(), costs.block.tolist()

    # best[i]: least seconds to have computed all blocks so far, the last one by server i; and who computed each block.
    best = {i: (arrive[i] + enter[i] + compute[i], [i]) for i in costs.holders(wanted.start).tolist()}
    for block in range(wanted.start + 1, wanted.end):
        following = {}
        for target in costs.holders(block).tolist():
            spent, source = min(
                (spent if source == target else spent + travel[source][target] + enter[target], source)
                for source, (spent, _) in best.items()
            )
            following[target] = (spent + compute[target], [*best[source][1], target])
        best = following
    _, last = min((spent + leave[i], i) for i, (spent, _) in best.items())
    return as_route(snapshot, wanted, best[last][1])
