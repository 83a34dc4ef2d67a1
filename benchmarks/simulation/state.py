"""The state of a simulated swarm: its servers, what they see of each other, and what is true.

Announcements become visible a little late and remain visible until they expire, as in the DHT. All servers see the
same, and each change becomes visible at the next multiple of `every` seconds. A server that decides before that moment
acts on outdated information. Renewals are not simulated one by one because they change nothing; when a server vanishes,
the time of its last renewal follows from the period.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from swarm.data_structures import Mobility, ServerInfo, ServerState, Span
from swarm.server.placement.best_move import Flags, Floats, Ints, PlacementSnapshot
from swarm.server.placement.initial_blocks import believed_throughputs, sum_by_block
from swarm.server.placement.move_decision import MoveHistory


@dataclass
class SimulatedServer:
    """One server of the simulated swarm.

    Attributes:
        row: its number; servers are numbered in the order in which they join.
        length: number of blocks that it holds.
        throughput: blocks/s that it really computes.
        announced: blocks/s that it announces.
        load_seconds: how long it takes to load its blocks.
        pinned: whether it never moves.
        state, span, mobility: what it announced last.
        changed: when it announced that.
        history: what it remembers between two checks for moves.
    """

    row: int
    length: int
    throughput: float
    announced: float
    load_seconds: float
    pinned: bool
    state: ServerState = ServerState.OFFLINE
    span: Span | None = None
    mobility: Mobility = Mobility.FREE
    changed: float = 0.0
    history: MoveHistory = field(default_factory=MoveHistory)

    @property
    def peer_id(self) -> str:
        return f"server{self.row:06d}"

    @property
    def lies(self) -> bool:
        return self.announced != self.throughput

    @property
    def serves(self) -> bool:
        return self.state is ServerState.ONLINE

    @property
    def rate(self) -> float:
        """Tokens/s that it really adds to each of its blocks while it serves."""
        return self.throughput / self.length

    def announcement(self) -> ServerInfo:
        """What it announces now."""
        assert self.span is not None
        return ServerInfo(
            peer_id=self.peer_id,
            span=self.span,
            state=self.state,
            throughput=self.announced,
            cache_tokens_free=1 << 20,
            revision="main",
            digests=(),
            compute_dtype="bfloat16",
            quantization="none",
            version="simulated",
            mobility=self.mobility,
        )


class ServerTable:
    """One row per server, in the order in which the servers joined. A server is identified by its row number."""

    def __init__(self) -> None:
        self._starts = np.zeros(64, dtype=np.int64)
        self._ends = np.zeros(64, dtype=np.int64)
        self._rates = np.zeros(64)
        self._flags = np.zeros(64, dtype=np.bool_)
        self._marks = np.zeros(64, dtype=np.int64)
        self._present = np.zeros(64, dtype=np.bool_)

    def set_server(self, row: int, span: Span, rate: float, flag: bool, mark: int = 0) -> None:
        """Set a server's blocks, the tokens/s that it adds to each, and two values for the caller's own use."""
        while row >= len(self._starts):
            self._grow()
        self._starts[row], self._ends[row], self._rates[row], self._flags[row] = span.start, span.end, rate, flag
        self._marks[row], self._present[row] = mark, True

    def remove(self, row: int) -> None:
        """Remove a server."""
        if row < len(self._present):
            self._present[row] = False

    @property
    def rows(self) -> Ints:
        """Row numbers of the servers in the table, ascending."""
        return np.flatnonzero(self._present)

    def columns(self) -> tuple[Ints, Ints, Floats, Flags, Ints]:
        """First block, block after the last, rate, flag and mark of the servers, in the order of `rows`."""
        rows = self.rows
        return self._starts[rows], self._ends[rows], self._rates[rows], self._flags[rows], self._marks[rows]

    def _grow(self) -> None:
        for name in ("_starts", "_ends", "_rates", "_flags", "_marks", "_present"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))


@dataclass(frozen=True)
class _DirectoryChange:
    row: int
    info: ServerInfo | None


class SimulatedDirectory:
    """The announcements that all servers see. All times are seconds of the virtual clock.

    Args:
        blocks: number of blocks of the model.
        every: changes become visible at multiples of this.
        period: time between two renewals of an announcement.
        lifetime: how long an announcement remains visible if it is not renewed.

    Attributes:
        version: changes whenever the visible announcements change.
    """

    def __init__(self, blocks: int, every: float, period: float, lifetime: float) -> None:
        self.version = 0
        self._blocks = blocks
        self._every = every
        self._period = period
        self._lifetime = lifetime
        self._table = ServerTable()
        self._infos: dict[int, ServerInfo] = {}
        self._due: list[tuple[float, int, _DirectoryChange]] = []
        self._count = itertools.count()
        self._snapshot: PlacementSnapshot | None = None

    def announce(self, row: int, info: ServerInfo, now: float) -> None:
        """Server number `row` announces a change."""
        self._schedule(
            self._next_visible_time(now), _DirectoryChange(row, info if info.state is not ServerState.OFFLINE else None)
        )

    def vanish(self, row: int, announced: float, now: float) -> None:
        """Server number `row` left silently; its last change was announced at `announced`."""
        renewed = now - (now - announced) % self._period
        self._schedule(renewed + self._lifetime, _DirectoryChange(row, None))

    def advance(self, now: float) -> None:
        """Apply all changes that become visible by `now`."""
        while self._due and self._due[0][0] <= now:
            _, _, change = heapq.heappop(self._due)
            self._apply(change)

    @property
    def visible(self) -> int:
        """Number of visible servers, in any state."""
        return len(self._infos)

    def throughputs(self) -> Floats:
        """Tokens/s that each block is believed to have (see `swarm.server.placement.initial_blocks`)."""
        starts, ends, rates, _, _ = self._table.columns()
        return believed_throughputs(starts, ends, rates, self._blocks)

    def snapshot(self) -> PlacementSnapshot:
        """The snapshot from which servers plan their moves."""
        if self._snapshot is None:
            starts, ends, rates, online, mobility = self._table.columns()
            peers = tuple(self._infos[row].peer_id for row in self._table.rows.tolist())
            self._snapshot = PlacementSnapshot(peers, starts, ends, rates, online, mobility, self._blocks)
        return self._snapshot

    def _next_visible_time(self, now: float) -> float:
        return (math.floor(now / self._every) + 1) * self._every

    def _schedule(self, time: float, change: _DirectoryChange) -> None:
        heapq.heappush(self._due, (time, next(self._count), change))

    def _apply(self, change: _DirectoryChange) -> None:
        self.version += 1
        self._snapshot = None
        if change.info is None:
            self._infos.pop(change.row, None)
            self._table.remove(change.row)
        else:
            info = change.info
            self._infos[change.row] = info
            self._table.set_server(
                change.row, info.span, info.tokens_per_second, info.state is ServerState.ONLINE, info.mobility
            )


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
