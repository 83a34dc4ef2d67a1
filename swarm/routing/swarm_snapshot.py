"""What a client knows about the swarm at one moment: the servers, and how far away they are.

A snapshot never changes. Many routes are planned from one, so the numpy columns that planning needs are built once,
when they are first used. Servers are numbered by their position in `servers`; `S` in a shape is the number of servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from swarm.data_structures import ServerInfo

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.integer]
Flags = npt.NDArray[np.bool_]

DEFAULT_ROUND_TRIP_S = 0.1
"""Round trip assumed for a server that was not pinged yet: the slow network of the Petals paper (section 3.3). Most
servers are nearer, so measured servers are preferred unless they are even slower."""

MAX_SECONDS = 1e6
"""Upper bound on every announced or measured time."""


@dataclass(frozen=True)
class AnnouncedLinks:
    """The `L` links between two servers that the first one announced, at most one for each pair.

    Attributes:
        sources: numbers of the announcing servers, [L].
        targets: numbers of the other servers, [L].
        seconds: one-way seconds, half of the announced round trips, [L].
        first: first boundary (number of the block after it) at which the target can take over, [L], ascending.
        last: last such boundary, [L]; less than `first` if there is none.
        longest: the largest difference between `last` and `first`.
    """

    sources: Indices
    targets: Indices
    seconds: Floats
    first: Indices
    last: Indices
    longest: int

    def at(self, boundary: int) -> Indices:
        """Indices of the links that a route may take from block `boundary - 1` to block `boundary`."""
        # In the dtype of the column, or searchsorted would convert the whole column on every call.
        bounds = np.array([boundary - self.longest, boundary + 1]).astype(self.first.dtype)
        begin, end = np.searchsorted(self.first, bounds)
        found: Indices = np.flatnonzero(self.last[begin:end] >= boundary)
        found += begin
        return found


@dataclass(frozen=True)
class SwarmSnapshot:
    """The swarm as one client sees it.

    Attributes:
        servers: compatible and online, at most one for each peer id.
        round_trips: peer id -> seconds from this client to the server and back; without the servers not yet measured.
        default_round_trip: seconds assumed for servers that were not measured.
    """

    servers: tuple[ServerInfo, ...]
    round_trips: Mapping[str, float] = field(default_factory=dict)
    default_round_trip: float = DEFAULT_ROUND_TRIP_S

    def __len__(self) -> int:
        return len(self.servers)

    def with_round_trips(self, round_trips: Mapping[str, float]) -> SwarmSnapshot:
        """The same servers with newer measurements. Cached columns, which are costly to build, are kept."""
        renewed = replace(self, round_trips=round_trips)
        for name, value in vars(self).items():
            if name not in ("client_round_trips", "measured"):
                vars(renewed).setdefault(name, value)
        return renewed

    def client_round_trip(self, peer_id: str) -> float:
        """Seconds from the client to this peer and back, measured or assumed."""
        return self.round_trips.get(peer_id, self.default_round_trip)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Peer id -> number of the server."""
        return {server.peer_id: number for number, server in enumerate(self.servers)}

    @cached_property
    def starts(self) -> Indices:
        """First block of each server, [S]."""
        return self._blocks("span.start")

    @cached_property
    def ends(self) -> Indices:
        """The block after each server's last one, [S]."""
        return self._blocks("span.end")

    @cached_property
    def throughputs(self) -> Floats:
        """Blocks a second, one token at a time, [S]."""
        return self._column("throughput")

    @cached_property
    def forward_throughputs(self) -> Floats:
        """Blocks x tokens a second, many tokens at once; 0 if unknown, [S]."""
        return self._column("forward_throughput")

    @cached_property
    def network_throughputs(self) -> Floats:
        """Tokens a second on the server's link; 0 if unknown, [S]."""
        return self._column("network_throughput")

    @cached_property
    def queues(self) -> Floats:
        """Seconds that a step waits in the queue, [S]."""
        return self._column("queue_delay")

    @cached_property
    def caches(self) -> Floats:
        """Free cache tokens, [S]."""
        return self._column("cache_tokens_free")

    @cached_property
    def sparse(self) -> Flags:
        """Which servers compute with some neurons only, [S]."""
        return np.fromiter((server.sparse for server in self.servers), np.bool_, len(self))

    @cached_property
    def relayed(self) -> Flags:
        """Which servers are reached through a relay only, [S]."""
        return np.fromiter((server.relayed for server in self.servers), np.bool_, len(self))

    @cached_property
    def client_round_trips(self) -> Floats:
        """Seconds from the client to each server and back, measured or assumed, [S]."""
        seconds = np.full(len(self), self.default_round_trip)
        for peer_id in self.round_trips.keys() & self.numbers.keys():
            seconds[self.numbers[peer_id]] = self.round_trips[peer_id]
        return seconds

    @cached_property
    def measured(self) -> Flags:
        """To which servers the client has measured its round trip, [S]."""
        return np.fromiter((server.peer_id in self.round_trips for server in self.servers), np.bool_, len(self))

    def holders(self, block: int) -> Flags:
        """Which servers hold the block, [S]."""
        return (self.starts <= block) & (block < self.ends)

    @cached_property
    def links(self) -> AnnouncedLinks:
        """All announced links between the servers. Collecting them is most of the work for a new snapshot."""
        announced = [dict(server.round_trips) for server in self.servers]
        counts = np.fromiter(map(len, announced), np.int64, len(self))
        total = int(counts.sum())
        peer_ids = chain.from_iterable(announced)
        sources = np.repeat(np.arange(len(self)), counts)
        targets = np.fromiter(map(self.numbers.get, peer_ids, repeat(-1)), np.int64, total)
        seconds = np.fromiter(chain.from_iterable(one.values() for one in announced), np.float64, total)
        first = np.maximum(self.starts[sources] + 1, self.starts[targets])
        last = np.minimum(self.ends[sources], self.ends[targets] - 1)
        kept = np.flatnonzero((targets >= 0) & (sources != targets))
        kept = kept[np.argsort(first[kept], kind="stable")]
        first, last = first[kept], last[kept]
        half = np.minimum(seconds[kept], MAX_SECONDS) / 2
        return AnnouncedLinks(sources[kept], targets[kept], half, first, last, int(np.max(last - first, initial=0)))

    def _column(self, attribute: str) -> Floats:
        return np.fromiter(map(attrgetter(attribute), self.servers), np.float64, len(self))

    def _blocks(self, attribute: str) -> Indices:
        return np.fromiter(map(attrgetter(attribute), self.servers), np.int16, len(self))
