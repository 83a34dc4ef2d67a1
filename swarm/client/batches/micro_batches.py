"""How the sequences of a batch are grouped into micro-batches, so that all servers of a route work at once. Pure.

The trade-off is that of a prompt's chunks (`prompt_chunks`): few micro-batches leave servers idle while the pipeline
fills and empties, and each micro-batch has a fixed cost. A sequence is never cut, because its backward pass computes it
again from its inputs and needs all of it. The backward pass is a pipeline of more expensive tokens and uses the same
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
    """The sequences of each micro-batch, ascending; all micro-batches hold about as many tokens.

    Args:
        counts: tokens of each sequence, >= 1.
        servers: the servers of the route.
        gradients: values in the gradients of one block's adapter, divided by `hidden_size`. They are sent back once for
            each micro-batch, whatever its size.
    """
    if not counts:
        return []
    total = sum(counts)
    cost = chunk_overhead(servers) + _gradient_cost(servers, gradients)
    size = total / chunk_count(total, len(servers), cost)
    middles = [end - count / 2 for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    groups = itertools.groupby(range(len(counts)), key=lambda index: int(middles[index] / size))
    sequences = [list(group) for _, group in groups]
    return [range(group[0], group[-1] + 1) for group in sequences]


def _gradient_cost(servers: Sequence[ServerInfo], gradients: float) -> float:
    """The cost of sending adapter gradients over the slowest link, in tokens that a server computes meanwhile.

    0 if no link has been measured.
    """
    if not gradients:
        return 0.0
    measured = [server for server in servers if server.network_throughput and server.forward_throughput]
    return gradients * max((server.forward_throughput / server.network_throughput for server in measured), default=0.0)
