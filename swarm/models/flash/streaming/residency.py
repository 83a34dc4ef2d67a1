"""Which blocks stay in memory, and which are streamed: decided once, from their sizes and a budget."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.common.units import format_bytes
from swarm.errors import NotEnoughMemory

BUFFERS = 2
"""Blocks in memory for streaming: one is computed with, the next is read."""


def needed_bytes(sizes: Sequence[int]) -> int:
    """The least memory with which blocks of these sizes, in bytes, can be computed."""
    return min(sum(sizes), BUFFERS * max(sizes))


def choose_resident(sizes: Sequence[int], budget: int) -> tuple[bool, ...]:
    """Which of the blocks stay in memory: as many as `budget` bytes hold beside the buffers for the others.

    They are spread evenly among the others, so that the drive reads while they are computed.

    Raises:
        NotEnoughMemory: the budget is smaller than `needed_bytes`.
    """
    count = len(sizes)
    for kept in range(count, -1, -1):
        chosen = {(2 * number + 1) * count // (2 * kept) for number in range(kept)}
        if _taken_bytes(sizes, chosen) <= budget:
            return tuple(block in chosen for block in range(count))
    raise NotEnoughMemory(
        f"{format_bytes(budget)} of memory for weights are too little: streaming these blocks takes "
        f"{format_bytes(needed_bytes(sizes))}, {BUFFERS} times the largest one; allow more memory or serve fewer blocks"
    )


def _taken_bytes(sizes: Sequence[int], resident: set[int]) -> int:
    streamed = [size for block, size in enumerate(sizes) if block not in resident]
    return sum(sizes[block] for block in resident) + BUFFERS * max(streamed, default=0)
