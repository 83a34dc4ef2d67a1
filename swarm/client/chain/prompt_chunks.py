"""Into how many chunks a prompt is cut, so that all servers of a chain work on it at once. Pure.

With h servers and m chunks the last chunk leaves the last server after m + h - 1 turns (GPipe; MDI-LLM): few chunks
leave servers idle while the pipeline fills and empties. Many chunks cost more each, because a chunk has a cost of its
own besides its tokens': the weights are read once a chunk. The best m is between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from swarm.data_structures import ServerInfo

OVERHEAD = 16.0
"""What a chunk costs beyond its tokens', in tokens, where servers did not say."""

LEAST_OVERHEAD, LARGEST_OVERHEAD = 4.0, 128.0
"""Announcements beyond these are not believed."""

SMALLEST, LARGEST = 32, 512
"""Tokens of a chunk. Between two chunks a server can do others' steps, also where it is the only one of its route."""

IN_FLIGHT = 512
"""Tokens that a server may have been handed and not answered, if that is two steps or more."""


def overhead(servers: Sequence[ServerInfo]) -> float:
    """What a chunk costs beyond its tokens', in tokens: a step of one token over one further token of a batch.

    A server for which both cost the same has not measured it: somebody gave it a figure.
    """
    known = [server for server in servers if server.forward_throughput > server.throughput > 0]
    found = [server.forward_throughput / server.throughput for server in known]
    return min(max(LEAST_OVERHEAD, statistics.median(found)), LARGEST_OVERHEAD) if found else OVERHEAD


def chunk_slots(slots: int, rows: int, servers: Sequence[ServerInfo], first_alone: bool = False) -> int:
    """Slots of each chunk of a step that brings `rows` rows of `slots` slots. All chunks are about as long.

    Args:
        first_alone: the others wait until the first chunk has left the last server; the pipeline is filled twice.
    """
    chunks = best_chunks(slots * rows, len(servers), overhead(servers), first_alone)
    return max(1, math.ceil(slots / chunks))


def best_chunks(tokens: int, hops: int, cost: float, first_alone: bool = False) -> int:
    """Into how many chunks of about the same size so many tokens are best cut, if each costs `cost` tokens more.

    m chunks of T tokens take (m + h - 1) (T / m + o) turns of a token, which is least for m = sqrt(T (h - 1) / o).
    How long the way to the servers is does not matter: chunks that follow each other travel at the same time.
    """
    filling = (hops - 1) * (2 if first_alone else 1)
    best = max(1, round(math.sqrt(tokens * filling / cost))) if filling > 0 else 1
    if (best + filling) * (tokens / best + cost) >= hops * (tokens + cost):
        best = 1
    return max(1, min(max(best, math.ceil(tokens / LARGEST)), tokens // SMALLEST))


def window(tokens: int) -> int:
    """How many chunks of so many tokens a server may have been handed and not answered."""
    return max(2, IN_FLIGHT // max(1, tokens))
