"""Which blocks a server should take. Pure: from what is announced to a span.

A joining server takes the contiguous window whose blocks are served worst (Petals, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.data_structures import ServerInfo, ServerState, Span


def block_throughputs(servers: Iterable[ServerInfo], blocks: int) -> list[float]:
    """Tokens/s that the swarm can push through each block; joining servers count, so that two do not take the same."""
    result = [0.0] * blocks
    for server in servers:
        if server.state is ServerState.OFFLINE:
            continue
        for block in range(server.span.start, min(server.span.end, blocks)):
            result[block] += server.throughput / server.span.length
    return result


def weakest_window(throughputs: Sequence[float], length: int) -> Span:
    """The window of `length` blocks that holds the weakest ones.

    Windows are compared by their blocks' throughputs from the lowest up, so a gap counts more than anything else, two
    gaps more than one; of equal windows the first is taken.
    """
    starts = range(len(throughputs) - length + 1)
    start = min(starts, key=lambda start: (sorted(throughputs[start : start + length]), start))
    return Span(start, start + length)
