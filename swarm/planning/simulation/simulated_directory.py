"""What the servers of the simulated swarm see of each other: the announcements, a little late, until they expire.

All see the same, and each change at the next multiple of `every` seconds: so servers that look between a change and
that moment decide from what is no longer true, as over a real DHT. Renewals are not simulated one by one, because they
change nothing; when a server vanishes, the time of its last one follows from the period.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from swarm.data_structures import ServerInfo, ServerState
from swarm.planning.simulation.server_table import ServerTable
from swarm.server.placement.initial_blocks import believed_throughputs
from swarm.server.placement.move_search import Floats, PlacementSnapshot


@dataclass(frozen=True)
class _DirectoryChange:
    row: int
    info: ServerInfo | None


class SimulatedDirectory:
    """Seconds of the virtual clock throughout.

    Args:
        blocks: of the model.
        every: changes are seen at multiples of this.
        period: between two renewals of an announcement.
        lifetime: how long an announcement is seen that is not renewed.

    Attributes:
        version: changes whenever something else is to be seen.
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
        self._at(self._next_look(now), _DirectoryChange(row, info if info.state is not ServerState.OFFLINE else None))

    def vanish(self, row: int, announced: float, now: float) -> None:
        """Server number `row` is gone without a word; its last change was announced at `announced`."""
        renewed = now - (now - announced) % self._period
        self._at(renewed + self._lifetime, _DirectoryChange(row, None))

    def look(self, now: float) -> None:
        """Make everything visible that is to be seen by `now`."""
        while self._due and self._due[0][0] <= now:
            _, _, change = heapq.heappop(self._due)
            self._apply(change)

    @property
    def visible(self) -> int:
        """How many servers are to be seen, in any state."""
        return len(self._infos)

    def online(self) -> tuple[ServerInfo, ...]:
        """The visible servers that are routed to."""
        return tuple(info for info in self._infos.values() if info.state is ServerState.ONLINE)

    def throughputs(self) -> Floats:
        """Tokens/s that each block is believed to have (see `swarm.server.placement.initial_blocks`)."""
        starts, ends, rates, _, _ = self._table.columns()
        return believed_throughputs(starts, ends, rates, self._blocks)

    def snapshot(self) -> PlacementSnapshot:
        """What plans are made from."""
        if self._snapshot is None:
            starts, ends, rates, online, mobility = self._table.columns()
            peers = tuple(self._infos[row].peer_id for row in self._table.rows.tolist())
            self._snapshot = PlacementSnapshot(
                peers, starts, ends, rates, online, mobility, ends - starts, rates, self._blocks
            )
        return self._snapshot

    def _next_look(self, now: float) -> float:
        return (math.floor(now / self._every) + 1) * self._every

    def _at(self, time: float, change: _DirectoryChange) -> None:
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
            self._table.put(
                change.row, info.span, info.tokens_per_second, info.state is ServerState.ONLINE, info.mobility
            )
