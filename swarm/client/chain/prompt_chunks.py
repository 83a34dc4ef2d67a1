"""Into how many chunks a prompt is cut, so that all servers of a chain work on it at once. Pure.

With h servers and m chunks the last chunk leaves the last server after m + h - 1 turns (GPipe; MDI-LLM). Few chunks
leave servers idle while the pipeline fills and empties. Many chunks cost more in all, because each has an overhead
beside its tokens: the weights are read once a chunk. The best m lies in between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from swarm.data_structures import ServerInfo

DEFAULT_OVERHEAD_TOKENS = 16.0
"""What a chunk costs beside its tokens, in tokens, if the servers did not measure it."""

MIN_OVERHEAD_TOKENS, MAX_OVERHEAD_TOKENS = 4.0, 128.0
"""What servers announce is clipped to this range."""

MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 32, 512
"""Tokens of a chunk. Between two chunks a server can compute other steps, even if it is alone in its route."""

MAX_TOKENS_IN_FLIGHT = 512
"""Tokens that a server may have been handed and not answered; two steps are always allowed."""


def chunk_overhead(servers: Sequence[ServerInfo]) -> float:
    """What a chunk costs beside its tokens, in tokens: a step of one token over one further token of a batch.

    A server for which both cost the same has not measured it: its throughput was given by hand.
    """
    known = [server for server in servers if server.forward_throughput > server.throughput > 0]
    found = [server.forward_throughput / server.throughput for server in known]
    return (
        min(max(MIN_OVERHEAD_TOKENS, statistics.median(found)), MAX_OVERHEAD_TOKENS)
        if found
        else DEFAULT_OVERHEAD_TOKENS
    )


def chunk_slots(slots: int, rows: int, servers: Sequence[ServerInfo], first_alone: bool = False) -> int:
    """Slots of each chunk of a step of `rows` sequences with `slots` slots each. All chunks are about as long.

    Args:
        first_alone: the others wait until the first chunk has left the last server, so the pipeline fills twice.
    """
    chunks = chunk_count(slots * rows, len(servers), chunk_overhead(servers), first_alone)
    return max(1, math.ceil(slots / chunks))


def chunk_count(tokens: int, hops: int, cost: float, first_alone: bool = False) -> int:
    """Into how many chunks of about the same size the tokens are best cut, if each chunk costs `cost` tokens more.

    m chunks of T tokens take (m + h - 1) (T / m + o) turns of a token, which is least for m = sqrt(T (h - 1) / o).
    The distance to the servers does not matter: chunks that follow each other travel at the same time.
    """
    filling = (hops - 1) * (2 if first_alone else 1)
    best = max(1, round(math.sqrt(tokens * filling / cost))) if filling > 0 else 1
    if (best + filling) * (tokens / best + cost) >= hops * (tokens + cost):
        best = 1
    return max(1, min(max(best, math.ceil(tokens / MAX_CHUNK_TOKENS)), tokens // MIN_CHUNK_TOKENS))


def max_chunks_in_flight(tokens: int) -> int:
    """How many chunks of `tokens` tokens a server may have been handed and not answered."""
    return max(2, MAX_TOKENS_IN_FLIGHT // max(1, tokens))
