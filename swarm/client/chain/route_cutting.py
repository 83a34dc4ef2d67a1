"""Cutting a server's span into successive hops at the same server. Pure.

What goes into a hop comes to this client. So a client that wants to see what tokens are in front of a block inside a
server's span opens the span as two sessions, one up to that block and one from there on.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from swarm.data_structures import Hop, Route, Span


def cut_route(route: Route, boundaries: Collection[int]) -> Route:
    """The same route, in which a hop begins at every boundary that lies inside it."""
    hops: list[Hop] = []
    for hop in route.hops:
        inside = {block for block in boundaries if hop.span.start < block < hop.span.end}
        edges = sorted({hop.span.start, *inside, hop.span.end})
        hops += [Hop(hop.server, Span(start, end)) for start, end in pairwise(edges)]
    return Route(tuple(hops))
