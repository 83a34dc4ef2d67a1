"""Records the true state of the simulated swarm, whatever its servers announce: throughput, gaps, moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.data_structures import Span
from swarm.planning.simulation.server_table import ServerTable
from swarm.server.placement.best_move import Floats
from swarm.server.placement.initial_blocks import sum_by_block


@dataclass(frozen=True)
class CoverageGap:
    """A period without a server for a block that was served before: from `began` to `ended` (seconds; None if open)."""

    block: int
    began: float
    ended: float | None


@dataclass(frozen=True)
class CompletedMove:
    """A server's move to other blocks; `time` is that of the decision, in seconds."""

    time: float
    peer_id: str
    old: Span
    new: Span
    closes_gap: bool


class GroundTruth:
    """The true state of the swarm, updated by `SimulatedSwarm` at every change.

    Attributes:
        gaps: gaps that have ended.
        moves: all moves so far.
        joined, left: number of servers that did so.
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

    def server_joined(self, row: int, capacity: float) -> None:
        """Record a server that joined and computes `capacity` blocks/s."""
        self.joined += 1
        self._capacity[row] = capacity

    def start_serving(self, row: int, span: Span, rate: float, lies: bool, now: float) -> None:
        """Record that a server began to serve `span` and really adds `rate` tokens/s to each of its blocks."""
        self._serving.set_server(row, span, rate, lies)
        self._holders[span.start : span.end] += 1
        for block in range(span.start, span.end):
            if block in self._gone_since:
                self.gaps.append(CoverageGap(block, self._gone_since.pop(block), now))

    def stop_serving(self, row: int, span: Span, now: float) -> None:
        """Record that a server stopped serving `span`."""
        self._serving.remove(row)
        self._holders[span.start : span.end] -= 1
        for block in range(span.start, span.end):
            if self._holders[block] == 0:
                self._gone_since[block] = now

    def server_left(self, row: int) -> None:
        """Record that a server left."""
        self.left += 1
        del self._capacity[row]

    def all_gaps(self) -> tuple[CoverageGap, ...]:
        """Gaps that have ended and gaps that are still open, in the order in which they began."""
        still_open = [CoverageGap(block, since, None) for block, since in self._gone_since.items()]
        return tuple(sorted([*self.gaps, *still_open], key=lambda gap: (gap.began, gap.block)))

    @property
    def servers(self) -> int:
        """Number of servers that are serving or loading."""
        return len(self._capacity)

    @property
    def gaps_now(self) -> int:
        """Number of blocks without a server, including those that never had one."""
        return int((self._holders == 0).sum())

    @property
    def optimum(self) -> float:
        """Upper bound on the throughput of the weakest block (tokens/s) for any placement of the current servers.

        Each server adds throughput / n tokens/s to n blocks. So all blocks together have the sum of all throughputs,
        and the weakest block has at most an equal share of it. Contiguous spans may not allow that much.
        """
        return sum(self._capacity.values()) / self._blocks

    def throughputs(self) -> Floats:
        """Tokens/s of each block."""
        starts, ends, rates, _, _ = self._serving.columns()
        return sum_by_block(starts, ends, rates, self._blocks)

    def near_liars(self) -> Floats:
        """Tokens/s of the blocks that servers with a false announcement hold."""
        starts, ends, _, lies, _ = self._serving.columns()
        held = sum_by_block(starts, ends, lies.astype(np.float64), self._blocks) > 0
        return self.throughputs()[held]
