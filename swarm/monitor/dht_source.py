"""Where the watch looks: the DHT, by a peer of its own that only asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from swarm.data_structures import ModelInfo, ServerState
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost
from swarm.monitor.swarm_view import AnnouncedModel
from swarm.routing.round_trips import RoundTrips
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.ping import ping_many

logger = logging.getLogger(__name__)

MAX_MODELS = 32
MAX_BLOCKS = 4096
"""Models that are looked at, and blocks of all of them: each block is a question to the DHT."""

PATIENCE = 30.0
"""Seconds that one look may take."""

PINGS = 32
PING_LIMIT = 4.0
"""Servers that are pinged after one look, and seconds for all of them."""

EMPTY_LOOKS = 3
REJOIN = 60.0
"""After so many looks that found nothing, and so many seconds, it joins the swarm anew: a peer that has lost everybody
it knew finds nobody again, though the initial peers may be back."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one look found.

    Attributes:
        found: the models, and their servers.
        absent: models asked for that nobody announces.
        left_out: models that were not looked at.
    """

    found: tuple[AnnouncedModel, ...]
    absent: tuple[str, ...] = ()
    left_out: int = 0


class SwarmSource(Protocol):
    """What a watch needs."""

    async def look(self, remembered: Sequence[ModelInfo]) -> PollResult:
        """The swarm now, and those models of `remembered` that nobody names any more. Raises a `SwarmError`."""

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Seconds to the peers that were measured lately; some are measured now."""

    async def close(self) -> None:
        """Leave the swarm."""


def chosen(
    listed: Sequence[ModelInfo], remembered: Sequence[ModelInfo], wanted: Sequence[str]
) -> tuple[list[ModelInfo], tuple[str, ...], int]:
    """Which models to look at, which of the wanted ones are not there, and how many are left out. Pure.

    Args:
        listed: as the DHT lists them, those that most peers name first.
        remembered: models seen before.
        wanted: names to which the view is limited; empty for all.
    """
    by_name = {info.name: info for info in [*remembered, *listed]}  # what is listed now is newer
    names = list(dict.fromkeys(info.name for info in [*listed, *remembered]))
    if wanted:
        names = [name for name in dict.fromkeys(wanted) if name in by_name]
    taken: list[ModelInfo] = []
    room = MAX_BLOCKS
    for name in names:
        if len(taken) < MAX_MODELS and by_name[name].blocks <= room:
            taken.append(by_name[name])
            room -= by_name[name].blocks
    absent = tuple(name for name in dict.fromkeys(wanted) if name not in by_name)
    return taken, absent, len(names) - len(taken)


class DhtSource:
    """The DHT of the swarm that the initial peers belong to.

    Args:
        initial_peers: addresses.
        models: names to which it is limited; empty for all.
        clock: seconds, never going back.
    """

    def __init__(
        self, initial_peers: tuple[str, ...], models: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._initial_peers = initial_peers
        self._models = tuple(models)
        self._clock = clock
        self._peer: Peer | None = None
        self._lost: asyncio.Task[None] | None = None
        self._joined = 0.0
        self._empty = 0
        self._measured = RoundTrips(lifetime=120.0)
        self._tried: dict[str, float] = {}

    async def join(self) -> None:
        """Be part of the swarm, unless it already is. Raises `PeerUnreachable` or `PeerLost`."""
        if self._peer is not None and self._lost is not None and self._lost.done():
            await self.close()  # its daemon has ended
        if self._peer is None:
            self._peer = await Peer.create(P2PConfig(initial_peers=self._initial_peers), AnnouncementValidator())
            self._lost = asyncio.create_task(self._peer.lost())
            self._joined, self._empty = self._clock(), 0

    async def look(self, remembered: Sequence[ModelInfo] = ()) -> PollResult:
        if self._empty >= EMPTY_LOOKS and self._clock() - self._joined >= REJOIN:
            await self.close()
        await self.join()
        assert self._peer is not None
        dht = self._peer.dht
        try:
            async with asyncio.timeout(PATIENCE):
                listed = await fetch_models(dht)
                models, absent, left_out = chosen(listed, remembered, self._models)
                servers = await asyncio.gather(*(fetch_servers(dht, model.name, model.blocks) for model in models))
        except TimeoutError:
            raise PeerLost(f"the swarm did not answer within {PATIENCE:g} s") from None
        self._empty = 0 if listed else self._empty + 1
        return PollResult(tuple(map(AnnouncedModel, models, map(tuple, servers))), absent, left_out)

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        assert self._peer is not None
        peers = list(dict.fromkeys(peer_ids))
        # Trying counts, not success: peers that never answer must not keep the others from being measured.
        turn = sorted(peers, key=lambda peer: self._tried.get(peer, -1.0))[:PINGS]
        measured = await ping_many(self._peer, turn, concurrency=PINGS, limit=PING_LIMIT)
        now = self._clock()
        self._tried = {peer: when for peer, when in self._tried.items() if peer in set(peers)}
        self._tried.update(dict.fromkeys(turn, now))
        for peer in turn:
            if peer in measured:
                self._measured.record(peer, measured[peer], now)
            else:
                self._measured.forget(peer)
        return self._measured.recent(now)

    async def close(self) -> None:
        peer, self._peer = self._peer, None
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.cancel()
            with suppress(asyncio.CancelledError):
                await lost
        if peer is not None:
            await peer.shutdown()


def reachable(look: PollResult) -> list[str]:
    """Peers whose round trip is worth measuring."""
    return [
        server.peer_id for found in look.found for server in found.servers if server.state is not ServerState.OFFLINE
    ]
