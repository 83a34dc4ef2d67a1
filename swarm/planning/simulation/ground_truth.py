"""What the simulated swarm really does, whatever its servers announce: true throughput, gaps, moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.data_structures import Span
from swarm.planning.simulation.server_table import ServerTable
from swarm.server.placement.initial_blocks import sum_by_block
from swarm.server.placement.move_search import Floats


@dataclass(frozen=True)
class CoverageGap:
    """A block that had been served and was not served from `began` to `ended` (seconds; None if it still is not)."""

    block: int
    began: float
    ended: float | None


@dataclass(frozen=True)
class CompletedMove:
    """A move at the time when it was decided, in seconds."""

    time: float
    peer_id: str
    old: Span
    new: Span
    closes_gap: bool


class GroundTruth:
    """Kept up to date by the world at every change.

    Attributes:
        gaps: those that have ended.
        moves: all moves made.
        joined, left: how many servers did.
    """

    def __init__(self, blocks: int) -> None:
        self.gaps: list[CoverageGap] = []
        self.moves: list[CompletedMove] = []
        self.joined = 0
        self.left = 0
        self._blocks = blocks
        self._serving = ServerTable()
        self._holders = np.zeros(blocks, dtype=np.int64)
        self._gone_since: dict[int, float] = {}
        self._capacity: dict[int, float] = {}

    def present(self, row: int, capacity: float) -> None:
        """A server has joined that computes `capacity` blocks/s."""
        self.joined += 1
        self._capacity[row] = capacity

    def serves(self, row: int, span: Span, rate: float, lies: bool, now: float) -> None:
        """A server has begun to serve, and truly adds `rate` tokens/s to each block of `span`."""
        self._serving.put(row, span, rate, lies)
        self._holders[span.start : span.end] += 1
        for block in range(span.start, span.end):
            if block in self._gone_since:
                self.gaps.append(CoverageGap(block, self._gone_since.pop(block), now))

    def serves_no_more(self, row: int, span: Span, now: float) -> None:
        """A server has ceased to serve `span`."""
        self._serving.remove(row)
        self._holders[span.start : span.end] -= 1
        for block in range(span.start, span.end):
            if self._holders[block] == 0:
                self._gone_since[block] = now

    def gone(self, row: int) -> None:
        """A server has left."""
        self.left += 1
        del self._capacity[row]

    def all_gaps(self) -> tuple[CoverageGap, ...]:
        """Those that have ended and those that have not, in the order in which they began."""
        still = [CoverageGap(block, since, None) for block, since in self._gone_since.items()]
        return tuple(sorted([*self.gaps, *still], key=lambda gap: (gap.began, gap.block)))

    @property
    def servers(self) -> int:
        """How many servers are there, serving or loading."""
        return len(self._capacity)

    @property
    def gaps_now(self) -> int:
        """How many blocks nobody serves, also of those that never were served."""
        return int((self._holders == 0).sum())

    @property
    def optimum(self) -> float:
        """Tokens/s of the weakest block that no placement of the servers that are there can exceed.

        Each server adds throughput / n tokens/s to n blocks. So all blocks together have the sum of all throughputs,
        and the weakest at most an even share of it. With whole servers and contiguous windows less may be possible.
        """
        return sum(self._capacity.values()) / self._blocks

    def throughputs(self) -> Floats:
        """Tokens/s of each block."""
        starts, ends, rates, _, _ = self._serving.columns()
        return sum_by_block(starts, ends, rates, self._blocks)

    def near_liars(self) -> Floats:
        """Tokens/s of the blocks that liars hold."""
        starts, ends, _, lies, _ = self._serving.columns()
        held = sum_by_block(starts, ends, lies.astype(np.float64), self._blocks) > 0
        return self.throughputs()[held]
