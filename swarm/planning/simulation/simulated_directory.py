"""Simulates the DHT: announcements become visible a little late and remain visible until they expire.

All servers see the same, and each change becomes visible at the next multiple of `every` seconds. A server that decides
before that moment acts on outdated information, as with a real DHT. Renewals are not simulated one by one because they
change nothing; when a server vanishes, the time of its last renewal follows from the period.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from swarm.data_structures import ServerInfo, ServerState
from swarm.planning.simulation.server_table import ServerTable
from swarm.server.placement.best_move import Floats, PlacementSnapshot
from swarm.server.placement.initial_blocks import believed_throughputs


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

    def online(self) -> tuple[ServerInfo, ...]:
        """The visible servers that clients may use."""
        return tuple(info for info in self._infos.values() if info.state is ServerState.ONLINE)

    def throughputs(self) -> Floats:
        """Tokens/s that each block is believed to have (see `swarm.server.placement.initial_blocks`)."""
        starts, ends, rates, _, _ = self._table.columns()
        return believed_throughputs(starts, ends, rates, self._blocks)

    def snapshot(self) -> PlacementSnapshot:
        """The snapshot from which servers plan their moves."""
        if self._snapshot is None:
            starts, ends, rates, online, mobility = self._table.columns()
            peers = tuple(self._infos[row].peer_id for row in self._table.rows.tolist())
            self._snapshot = PlacementSnapshot(
                peers, starts, ends, rates, online, mobility, ends - starts, rates, self._blocks
            )
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
