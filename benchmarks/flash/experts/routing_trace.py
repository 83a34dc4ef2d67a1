"""Traces of routing, and what a cache of experts would have had to read for them.

A trace is `[tokens, blocks, experts a token]`: which experts each token of one text needed in each block, one token
after the other. `reads` plays it through the cache that serves, `fewest_reads` through the best possible one.
"""

from __future__ import annotations

import heapq

import numpy as np

from swarm.models.flash.experts.expert_pool import ExpertCache
from swarm.models.flash.stay_priority import StayPriority

Trace = np.ndarray
"""Numbers of experts, `[tokens, blocks, experts a token]`."""

Key = tuple[int, int]
"""A block and an expert."""


def reads(trace_TBK: Trace, slots: int, priority: StayPriority) -> np.ndarray:
    """Number of experts that `ExpertCache` reads for each token, `[tokens]`.

    Args:
        slots: of the pool that all blocks share; at least as many as a token needs in one block.
        priority: a rule that has not learned anything yet, for the trace's blocks.
    """
    cache = ExpertCache(slots, priority)
    tokens, blocks, _ = trace_TBK.shape
    counts = np.zeros(tokens, dtype=np.int64)
    for token in range(tokens):
        for block in range(blocks):
            needed = np.unique(trace_TBK[token, block]).astype(np.int64)
            plan = cache.plan(block, needed, np.ones(len(needed)), 1)
            counts[token] += sum(map(len, plan.reads))
    return counts


def fewest_reads(trace_TBK: Trace, slots: int) -> np.ndarray:
    """Number of experts that the best possible cache reads for each token, `[tokens]`: Belady's optimum.

    It knows the future: whenever a slot is needed, the expert leaves that is needed again last. No cache of as many
    slots reads less.

    Args:
        slots: of the pool that all blocks share.
    """
    tokens, blocks, _ = trace_TBK.shape
    requests = [
        (token, (block, expert))
        for token in range(tokens)
        for block in range(blocks)
        for expert in np.unique(trace_TBK[token, block]).tolist()
    ]
    counts = np.zeros(tokens, dtype=np.int64)
    held: dict[Key, int] = {}  # to the request that needs it next
    last_first: list[tuple[int, Key]] = []  # the same as a heap, the last one first; may hold old entries
    for (token, key), next_use in zip(requests, _next_uses([key for _, key in requests]), strict=True):
        if key not in held:
            counts[token] += 1
            if len(held) == slots:
                _let_last_leave(held, last_first)
        held[key] = next_use
        heapq.heappush(last_first, (-next_use, key))
    return counts


def overlap(trace_TBK: Trace) -> float:
    """The share of a token's experts that the token before it needed as well: a mean over blocks and tokens."""
    same = trace_TBK[1:, :, :, None] == trace_TBK[:-1, :, None, :]
    return float(same.any(axis=3).mean())


def _let_last_leave(held: dict[Key, int], last_first: list[tuple[int, Key]]) -> None:
    while True:
        use, key = heapq.heappop(last_first)
        if held.get(key) == -use:
            del held[key]
            return


def _next_uses(requests: list[Key]) -> list[int]:
    """For each request, the number of the next one for the same expert; the number of requests if there is none."""
    later: dict[Key, int] = {}
    result = []
    for number in range(len(requests) - 1, -1, -1):
        result.append(later.get(requests[number], len(requests)))
        later[requests[number]] = number
    return result[::-1]
