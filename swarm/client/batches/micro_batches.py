"""Into which micro-batches the rows of a batch are put, so that all servers of a route work at the same time. Pure.

The rule for a prompt's chunks (`prompt_chunks`) holds here: few micro-batches leave servers idle while the pipeline
fills and empties, and each one costs something beyond its tokens. A row is never cut: the backward pass computes it
again from its inputs and needs all of it. The backward pass is a pipeline of costlier tokens, so it uses the same
micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from swarm.client.chain.prompt_chunks import chunk_count, chunk_overhead
from swarm.data_structures import ServerInfo


def split_into_micro_batches(
    counts: Sequence[int], servers: Sequence[ServerInfo], gradients: float = 0.0
) -> list[range]:
    """Rows that go together, ascending; all micro-batches hold about as many tokens.

    Args:
        counts: tokens of each row, >= 1.
        servers: of the route.
        gradients: numbers in the gradients of one block's adapter, for each number in a token's hidden state. They come
            back once a micro-batch, whatever its size.
    """
    if not counts:
        return []
    total = sum(counts)
    size = total / chunk_count(total, len(servers), chunk_overhead(servers) + _travel(servers, gradients))
    middles = [end - count / 2 for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    groups = itertools.groupby(range(len(counts)), key=lambda row: int(middles[row] / size))
    rows = [list(group) for _, group in groups]
    return [range(group[0], group[-1] + 1) for group in rows]


def _travel(servers: Sequence[ServerInfo], gradients: float) -> float:
    """What the gradients of adapters cost on the slowest link, in tokens computed meanwhile; 0 if no link is known."""
    if not gradients:
        return 0.0
    measured = [server for server in servers if server.network_throughput and server.forward_throughput]
    return gradients * max((server.forward_throughput / server.network_throughput for server in measured), default=0.0)
