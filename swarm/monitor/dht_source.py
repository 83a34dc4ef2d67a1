"""Reads the state of the swarm from its DHT, through a peer that announces nothing itself."""

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
from swarm.membership.invite import Invite
from swarm.monitor.swarm_view import AnnouncedModel
from swarm.routing.round_trips import RoundTrips
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.ping import ping_many

logger = logging.getLogger(__name__)

MAX_MODELS = 32
MAX_BLOCKS = 4096
"""Limits on the models, and on the blocks of all of them, that are read: each block takes one DHT request."""

POLL_TIMEOUT_S = 30.0
"""Limit for one poll."""

PINGS_PER_POLL = 32
PING_TIMEOUT_S = 4.0
"""Number of servers that are pinged after a poll, and the limit for all of these pings."""

EMPTY_POLLS_BEFORE_REJOIN = 3
REJOIN_AFTER_S = 60.0
"""After this many polls without a model, and this much time, the peer joins again: a peer that has lost all peers it
knew cannot find the swarm any more, even if the initial peers are back."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one poll found.

    Attributes:
        found: the models, and their servers.
        absent: models asked for that no server announces.
        left_out: models that were not looked at.
        others: names of models that were not asked for, if some that were are absent.
    """

    models: tuple[AnnouncedModel, ...]
    absent: tuple[str, ...] = ()
    left_out: int = 0
    others: tuple[str, ...] = ()


class SwarmSource(Protocol):
    """Where a `SwarmPoller` reads the state of the swarm."""

    async def poll(self, remembered: Sequence[ModelInfo]) -> PollResult:
        """Read the announced models, and those of `remembered` that are no longer announced. Raises a `SwarmError`."""

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Measure some of the peers; returns the round trips of all peers measured recently, in seconds."""

    async def close(self) -> None:
        """Leave the swarm."""


def select_models(
    listed: Sequence[ModelInfo], remembered: Sequence[ModelInfo], requested: Sequence[str]
) -> tuple[list[ModelInfo], tuple[str, ...], int]:
    """Select the models to read. Pure. Returns them, the requested ones that are absent, and the number left out.

    Args:
        listed: as listed by the DHT, those that most peers announce first.
        remembered: models seen before.
        requested: names of the models to show; empty for all.
    """
    by_name = {info.name: info for info in [*remembered, *listed]}  # listed entries are newer
    names = list(dict.fromkeys(info.name for info in [*listed, *remembered]))
    if requested:
        names = [name for name in dict.fromkeys(requested) if name in by_name]
    selected: list[ModelInfo] = []
    blocks_left = MAX_BLOCKS
    for name in names:
        if len(selected) < MAX_MODELS and by_name[name].blocks <= blocks_left:
            selected.append(by_name[name])
            blocks_left -= by_name[name].blocks
    absent = tuple(name for name in dict.fromkeys(requested) if name not in by_name)
    return selected, absent, len(names) - len(selected)


class DhtSource:
    """Reads the DHT of the swarm that the initial peers belong to.

    Args:
        initial_peers: addresses.
        membership: this peer's invite to a private swarm; None for an open swarm.
        models: names of the models to read; empty for all.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        models: Sequence[str] = (),
        membership: Invite | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = P2PConfig(initial_peers=initial_peers, membership=membership)
        self._models = tuple(models)
        self._clock = clock
        self._peer: Peer | None = None
        self._lost: asyncio.Task[None] | None = None
        self._joined = 0.0
        self._empty = 0
        self._measured = RoundTrips(lifetime=120.0)
        self._tried: dict[str, float] = {}

    async def join(self) -> None:
        """Join the swarm unless it has already joined. Raises `PeerUnreachable` or `PeerLost`."""
        if self._peer is not None and self._lost is not None and self._lost.done():
            await self.close()  # its daemon has ended
        if self._peer is None:
            self._peer = await Peer.create(self._config, AnnouncementValidator())
            self._lost = asyncio.create_task(self._peer.wait_until_cut_off())
            self._joined, self._empty = self._clock(), 0

    async def poll(self, remembered: Sequence[ModelInfo] = ()) -> PollResult:
        if self._empty >= EMPTY_POLLS_BEFORE_REJOIN and self._clock() - self._joined >= REJOIN_AFTER_S:
            await self.close()
        await self.join()
        assert self._peer is not None
        dht = self._peer.dht
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                listed = await fetch_models(dht)
                models, absent, left_out = select_models(listed, remembered, self._models)
                servers = await asyncio.gather(*(fetch_servers(dht, model.name, model.blocks) for model in models))
        except TimeoutError:
            raise PeerLost(f"the swarm did not answer within {POLL_TIMEOUT_S:g} s") from None
        self._empty = 0 if listed else self._empty + 1
        others = tuple(one.name for one in listed if absent and one not in models)[:MAX_MODELS]
        return PollResult(tuple(map(AnnouncedModel, models, map(tuple, servers))), absent, left_out, others)

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        assert self._peer is not None
        peers = list(dict.fromkeys(peer_ids))
        # Order by the last attempt, not the last success: peers that never answer must not block the others.
        pinged = sorted(peers, key=lambda peer: self._tried.get(peer, -1.0))[:PINGS_PER_POLL]
        measured = await ping_many(self._peer, pinged, concurrency=PINGS_PER_POLL, limit=PING_TIMEOUT_S)
        now = self._clock()
        self._tried = {peer: when for peer, when in self._tried.items() if peer in set(peers)}
        self._tried.update(dict.fromkeys(pinged, now))
        for peer in pinged:
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


def peers_to_ping(look: PollResult) -> list[str]:
    """Ids of the peers whose round trip is worth measuring."""
    return [
        server.peer_id for models in look.models for server in models.servers if server.state is not ServerState.OFFLINE
    ]
