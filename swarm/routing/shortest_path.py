"""The route of least expected time, exactly and plainly: the reference beside `swarm.routing.beam_search`.

Dynamic programming over (block, server that computed it). All pairs of servers are tried at every boundary, in plain
Python: good for hundreds of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from swarm.data_structures import Hop, Route, ServerInfo, Span
from swarm.errors import MissingBlocks
from swarm.routing.cost_model import CostModel, Demand, as_route, check_held
from swarm.routing.snapshot import Snapshot


def shortest_path(snapshot: Snapshot, wanted: Span, demand: Demand | None = None) -> Route:
    """The route over `wanted` of least `route_seconds`. Raises `MissingBlocks` with the blocks that nobody holds."""
    costs = CostModel(snapshot, demand or Demand())
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


HopCost = Callable[[ServerInfo, int], float]
"""Seconds that a step spends at a server for this number of blocks, travel included."""


def hop_cost(round_trip: float) -> HopCost:
    """Cost with the same round trip (seconds) to every server."""
    return lambda server, blocks: round_trip + blocks / server.throughput


def shortest_route(servers: Sequence[ServerInfo], wanted: Span, cost: HopCost) -> Route:
    """The route over `wanted` of least cost. Raises `MissingBlocks` with the blocks that nobody holds."""
    missing = [block for block in range(wanted.start, wanted.end) if not any(block in s.span for s in servers)]
    if missing:
        raise MissingBlocks(missing)
    # best[b]: cost of the cheapest way to have computed all blocks before b, and its last hop.
    best: dict[int, tuple[float, Hop | None]] = {wanted.start: (0.0, None)}
    for block in range(wanted.start, wanted.end):
        spent = best[block][0]
        for server in servers:
            if block not in server.span:
                continue
            for end in range(block + 1, min(server.span.end, wanted.end) + 1):
                total = spent + cost(server, end - block)
                if end not in best or total < best[end][0]:
                    best[end] = (total, Hop(server, Span(block, end)))
    return Route(tuple(_walk_back(best, wanted)))


def _walk_back(best: dict[int, tuple[float, Hop | None]], wanted: Span) -> list[Hop]:
    hops: list[Hop] = []
    block = wanted.end
    while block > wanted.start:
        hop = best[block][1]
        assert hop is not None
        hops.append(hop)
        block = hop.span.start
    return hops[::-1]
