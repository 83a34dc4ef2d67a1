"""Measures the links to the servers that a route may continue to from here.

Every update period, a loop pings a few of them, so that the announcement can list round trips. Now and then it measures
the bandwidth towards peers picked at random. Errors never affect the server: they are logged and the measurement is
repeated. The choice of peers is pure.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from random import Random

from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.dht.server_records import MAX_ROUND_TRIPS
from swarm.errors import RemoteError
from swarm.routing.round_trips import RoundTrips
from swarm.transport.ping import measure_bandwidth, ping_many
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)

MAX_PINGS = 16
"""Servers pinged in one period."""

NEXT_SHARE = 0.75
"""Share of the pings that goes to servers which hold the block after this server's span, if there are enough."""

MAX_PROBED_PEERS = 3
"""Peers to which the bandwidth is measured."""

BANDWIDTH_PERIOD_S = 600.0
"""Seconds between measurements of the bandwidth, which cost megabytes."""

BANDWIDTH_RETRY_S = 60.0
"""Seconds until the next attempt after one that no peer answered."""

VIEW_TIMEOUT_S = 30.0
"""How long fetching the announcements may take."""

BYTES_PER_VALUE = 2
"""Hidden states travel in 16 bits (a client may ask for 8, or for 32: this is the middle)."""

MAX_RATE = 1e9
"""Tokens/s that an announcement may claim."""

FetchServers = Callable[[], Awaitable[Sequence[ServerInfo]]]


def next_hop_candidates(servers: Sequence[ServerInfo], own_id: str, span: Span) -> tuple[list[str], list[str]]:
    """Peers that a route may go on to from `span`: those that hold the block behind it, and the other ones.

    The other ones overlap with the span and go on from one of its inner blocks, where a route may leave this server.
    """
    behind: list[str] = []
    inside: list[str] = []
    for server in servers:
        if server.peer_id == own_id or server.state is not ServerState.ONLINE:
            continue
        if span.end in server.span:
            behind.append(server.peer_id)
        elif server.span.start < span.end and server.span.end > span.start + 1:
            inside.append(server.peer_id)
    return behind, inside


def choose_peers_to_ping(
    behind: Sequence[str],
    inside: Sequence[str],
    tried: Mapping[str, float],
    random: Random,
    limit: int = MAX_PINGS,
) -> list[str]:
    """At most `limit` peers, new ones first, then those tried longest ago; which of equals is left to chance.

    Trying counts, not success: peers that never answer must not keep the others from being measured again.

    Args:
        behind, inside: see `next_hop_candidates`. The first get most places; each gets what the other leaves free.
        tried: when each peer was last tried; those that never were are missing.
    """

    def by_turn(peers: Sequence[str]) -> list[str]:
        return sorted(random.sample(peers, len(peers)), key=lambda peer: tried.get(peer, -math.inf))

    first, second = by_turn(behind), by_turn(inside)
    share = max(math.ceil(limit * NEXT_SHARE), limit - len(second))
    chosen = first[:share]
    return chosen + second[: limit - len(chosen)]


class LinkMeasurement:
    """Measures this server's links until it is stopped.

    Args:
        network: this peer.
        span: the blocks held now; None while there are none.
        fetch: fetches the servers of the model, which may include this one.
        hidden_size: values of one token's hidden state.
        period: seconds between rounds.
        random: for the choice of peers.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        network: Network,
        span: Callable[[], Span | None],
        fetch: FetchServers,
        hidden_size: int,
        period: float,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network_throughput = 0.0
        """Tokens/s of hidden states that the link to other peers carries; 0 until it has been measured."""
        self._network = network
        self._span = span
        self._fetch = fetch
        self._bytes_per_token = hidden_size * BYTES_PER_VALUE
        self._period = period
        self._random = random or Random()
        self._clock = clock
        self._measured = RoundTrips()
        self._tried: dict[str, float] = {}
        self._current: list[str] = []  # those of the last view
        self._network_due = -math.inf
        self._task: asyncio.Task[None] | None = None

    @property
    def round_trips(self) -> tuple[tuple[str, float], ...]:
        """(peer id, seconds) of the neighbors of the last view that are known, nearest first, for the announcement."""
        now = self._clock()
        known = [(peer, seconds) for peer in self._current if (seconds := self._measured.get(peer, now)) is not None]
        return tuple(sorted(known, key=lambda pair: pair[1])[:MAX_ROUND_TRIPS])

    def start(self) -> None:
        """Measure now, and then once every period."""
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """Stop measuring. Results are kept."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def measure_once(self) -> None:
        """Measure once. Raises what `fetch` raises."""
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            servers = await self._fetch()
        await self._ping(servers)
        if self._clock() >= self._network_due:
            await self._probe(servers)

    async def _ping(self, servers: Sequence[ServerInfo]) -> None:
        span = self._span()
        behind, inside = next_hop_candidates(servers, self._network.peer_id, span) if span is not None else ([], [])
        self._current = behind + inside
        chosen = choose_peers_to_ping(behind, inside, self._tried, self._random)
        found = await ping_many(self._network, chosen, concurrency=MAX_PINGS)
        now = self._clock()
        current = set(self._current)
        self._tried.update(dict.fromkeys(chosen, now))
        self._tried = {peer: when for peer, when in self._tried.items() if peer in current}
        for peer in chosen:
            if peer in found:
                self._measured.record(peer, found[peer], now)
            else:
                self._measured.forget(peer)  # announcing it would lead routes to a link that is gone

    async def _probe(self, servers: Sequence[ServerInfo]) -> None:
        others = [s.peer_id for s in servers if s.peer_id != self._network.peer_id and s.state is ServerState.ONLINE]
        rates = []
        for peer in self._random.sample(others, min(MAX_PROBED_PEERS, len(others))):
            try:
                found = await measure_bandwidth(self._network, peer)
            except RemoteError as error:
                logger.debug("the link to …%s was not measured: %s", peer[-6:], error)
            else:
                rates.append(min(found.up, found.down) / self._bytes_per_token)
        if rates:
            self.network_throughput = min(statistics.median(rates), MAX_RATE)
            # Servers that started together must not go on measuring together.
            self._network_due = self._clock() + BANDWIDTH_PERIOD_S * self._random.uniform(0.8, 1.2)
        elif others:
            self._network_due = self._clock() + BANDWIDTH_RETRY_S

    async def _loop(self) -> None:
        while True:
            try:
                await self.measure_once()
            except Exception as error:  # noqa: BLE001  (whatever one round raises, the next one may succeed)
                logger.debug("the links to other servers were not measured: %r", error)
            await asyncio.sleep(self._period)
