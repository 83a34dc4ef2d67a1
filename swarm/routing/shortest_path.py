"""The cheapest chain of servers, exactly: dynamic programming over block boundaries.

A server may be entered and left in the middle of its span. The cost of a hop is a round trip plus the time to compute
the blocks used there, so long spans and fast servers win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.data_structures import Hop, Route, ServerInfo, Span
from swarm.errors import MissingBlocks

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
