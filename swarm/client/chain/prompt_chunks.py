"""Into how many chunks a prompt is cut, so that all servers of a chain work on it at once. Pure.

With h servers and m chunks the last chunk leaves the last server after m + h - 1 turns (GPipe; MDI-LLM). Few chunks
leave servers idle while the pipeline fills and empties. Many chunks cost more in all, because each has an overhead
beside its tokens: the weights are read once a chunk. The best m lies in between. Thin links are stages of the pipeline,
too, and cost nothing beside the tokens that they carry: the thinner they are, the more chunks are best.
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

MAX_CARRY = 64.0
"""What announced links are clipped to: a token takes at most so many times as long to carry as to compute."""

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


def carry_cost(servers: Sequence[ServerInfo]) -> float:
    """What carrying a token over the thinnest link takes, in tokens that the slowest server computes meanwhile."""
    measured = [server for server in servers if server.network_throughput and server.forward_throughput]
    if not measured:
        return 0.0
    computed = min(server.forward_throughput / server.span.length for server in measured)
    return min(computed / min(server.network_throughput for server in measured), MAX_CARRY)


def chunk_slots(slots: int, rows: int, servers: Sequence[ServerInfo], first_alone: bool = False) -> int:
    """Slots of each chunk of a step of `rows` sequences with `slots` slots each. All chunks are about as long.

    Args:
        first_alone: the others wait until the first chunk has left the last server, so the pipeline fills twice.
    """
    chunks = chunk_count(slots * rows, len(servers), chunk_overhead(servers), first_alone, carry_cost(servers))
    return max(1, math.ceil(slots / chunks))


def chunk_count(tokens: int, hops: int, cost: float, first_alone: bool = False, carry: float = 0.0) -> int:
    """Into how many chunks of about the same size the tokens are best cut.

    With m chunks of T tokens, a server's turn is T / m + o, and a link's T c / m. All together take a turn of each of h
    servers and h + 1 links, and m - 1 of the slowest. That is least for m = sqrt(T (h - 1 + (h + 1) c) / o) where
    servers are slowest, and where links are, for the m at which they no longer are. The distance to the servers does
    not matter: chunks that follow each other travel at the same time.

    Args:
        cost: o, what a chunk costs a server beside its tokens, in tokens.
        first_alone: the others wait until the first chunk has left the last server, so the pipeline fills twice.
        carry: c, what carrying a token takes, in tokens that a server computes meanwhile.
    """
    filling = (hops - 1 + (hops + 1) * carry) * (2 if first_alone else 1)
    best = max(1, round(max(math.sqrt(tokens * max(0, filling) / cost), tokens * (carry - 1) / cost)))

    def turns(chunks: int) -> float:
        server, link = tokens / chunks + cost, tokens / chunks * carry
        alone = first_alone and chunks > 1
        return (1 + alone) * (hops * server + (hops + 1) * link) + (chunks - 1 - alone) * max(server, link)

    if turns(best) >= turns(1):
        best = 1
    return max(1, min(max(best, math.ceil(tokens / MAX_CHUNK_TOKENS)), tokens // MIN_CHUNK_TOKENS))


def max_chunks_in_flight(tokens: int) -> int:
    """How many chunks of `tokens` tokens a server may have been handed and not answered."""
    return max(2, MAX_TOKENS_IN_FLIGHT // max(1, tokens))
