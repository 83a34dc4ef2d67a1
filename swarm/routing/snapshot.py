"""What a client knows about the swarm at one moment: who serves, and how far away they are.

A snapshot never changes. Many routes are planned from one, so what planning needs as numpy columns is built once, when
it is first asked for. Servers are numbered by their place in `servers`; `S` in a shape is their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from swarm.data_structures import ServerInfo

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DEFAULT_ROUND_TRIP = 0.1
"""Seconds assumed to a server that was not pinged yet: the slow network of the Petals paper's measurements (section
3.3). Most servers are nearer, so what was measured is preferred until it turns out to be worse than that."""


@dataclass(frozen=True)
class Neighbours:
    """Round trips that one server announces.

    Attributes:
        servers: the numbers of those it measured; -1 for one that the snapshot does not hold.
        seconds: the round trips.
    """

    servers: Indices
    seconds: Floats


@dataclass(frozen=True)
class Snapshot:
    """The swarm as one client sees it.

    Attributes:
        servers: compatible and online, at most one for each peer id.
        round_trips: peer id -> seconds from this client to the server and back; who is missing was not measured.
        default_round_trip: seconds assumed where nothing was measured.
    """

    servers: tuple[ServerInfo, ...]
    round_trips: Mapping[str, float] = field(default_factory=dict)
    default_round_trip: float = DEFAULT_ROUND_TRIP

    def __len__(self) -> int:
        return len(self.servers)

    def client_round_trip(self, peer_id: str) -> float:
        """Seconds from the client to this peer and back, measured or assumed."""
        return self.round_trips.get(peer_id, self.default_round_trip)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Peer id -> number of the server."""
        return {server.peer_id: number for number, server in enumerate(self.servers)}

    @cached_property
    def starts(self) -> Floats:
        """First block of each server, [S]."""
        return self._column("span.start")

    @cached_property
    def ends(self) -> Floats:
        """The block behind each server's last one, [S]."""
        return self._column("span.end")

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
        """Seconds that a step waits, [S]."""
        return self._column("queue")

    @cached_property
    def caches(self) -> Floats:
        """Free cache tokens, [S]."""
        return self._column("cache_tokens_free")

    @cached_property
    def client_round_trips(self) -> Floats:
        """Seconds from the client to each server and back, measured or assumed, [S]."""
        seconds = np.full(len(self), self.default_round_trip)
        for peer_id in self.round_trips.keys() & self.numbers.keys():
            seconds[self.numbers[peer_id]] = self.round_trips[peer_id]
        return seconds

    def holders(self, block: int) -> Flags:
        """Which servers hold the block, [S]."""
        return (self.starts <= block) & (block < self.ends)

    def neighbours(self, number: int) -> Neighbours:
        """What server `number` announced about its ways to others."""
        known = self._neighbours.get(number)
        if known is None:
            # One by one and only when asked: reading what ten thousand servers announce takes longer than a route.
            announced = self.servers[number].round_trips
            peer_ids, seconds = zip(*announced, strict=True) if announced else ((), ())
            servers = np.array(list(map(self.numbers.get, peer_ids, repeat(-1))), np.int64)
            known = self._neighbours[number] = Neighbours(servers, np.array(seconds, np.float64))
        return known

    @cached_property
    def _neighbours(self) -> dict[int, Neighbours]:
        return {}

    def _column(self, attribute: str) -> Floats:
        return np.fromiter(map(attrgetter(attribute), self.servers), np.float64, len(self))
