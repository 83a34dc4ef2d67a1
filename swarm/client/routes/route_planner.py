"""A client's picture of the swarm, kept up to date, and the routes through it.

Routes are planned from the picture as it is: nothing waits for the DHT while a person waits for a token. Only where the
picture holds no route, or is older than it should be, is it renewed first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from swarm.client.config import ClientConfig
from swarm.client.local_blocks import describe_route
from swarm.client.routes.events import EventListener, PeerAvoided, ignore_events
from swarm.data_structures import Route, ServerInfo, Span
from swarm.dht.directory import fetch_servers
from swarm.errors import (
    CacheFull,
    MissingBlocks,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RequestRefused,
    ServerClosing,
    WrongSpan,
)
from swarm.routing.batch_split import BatchShare
from swarm.routing.compatibility import compatible_servers
from swarm.routing.peer_health import PeerFailure
from swarm.routing.router import Router
from swarm.transport.p2p import Peer
from swarm.transport.ping import ping_many

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PING_TIMEOUT_S = 1.0
"""Seconds that the first route waits for pings: a guess would last for the whole session."""

REFRESH_TIMEOUT_S = 15.0
"""Seconds to wait for a look at the swarm."""

STALE_REFRESH_TIMEOUT_S = 2.0
"""Seconds to wait for a new picture where there is an old one, which may still be right."""

MIN_REFRESH_INTERVAL_S = 1.0
"""Seconds after which a picture without a route is worth renewing."""

IDLE_TIMEOUT_S = 120.0
"""Seconds without a request after which a client no longer asks the swarm anything."""

_FAILURES: tuple[tuple[type[Exception], PeerFailure], ...] = (
    (PeerTimeout, PeerFailure.TIMED_OUT),
    (PeerLost, PeerFailure.UNREACHABLE),
    (ProtocolViolation, PeerFailure.WRONG_ANSWER),
    (CacheFull, PeerFailure.CACHE_FULL),
    (ServerClosing, PeerFailure.CLOSING),
    (WrongSpan, PeerFailure.CLOSING),  # it moved to other blocks since it was last announced
    (RequestRefused, PeerFailure.REFUSED),
)


class RoutePlanner:
    """Plans the routes of one client.

    Args:
        peer: this client's place in the network.
        config: see `ClientConfig`.
        model, revision, blocks, digests: see `SwarmConnection`.
        tell: hears which servers are kept out of routes.
    """

    def __init__(
        self,
        peer: Peer,
        config: ClientConfig,
        model: str,
        revision: str,
        blocks: int,
        digests: Sequence[str] | None,
        tell: EventListener = ignore_events,
    ) -> None:
        self._tell = tell
        self.missing_blocks_timeout = config.wait_for_blocks
        self.router = Router(config.allowed_servers, config.blocked_servers)
        self._peer = peer
        self._config = config
        self._model = model
        self._revision = revision
        self._blocks = Span(0, blocks)
        self._digests = digests
        self._fetched = self._used = float("-inf")
        self._random = random.Random()
        self._pinging: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers that this client may use, as last seen."""
        return self.router.snapshot.servers

    async def route(self, span: Span, before: str | None, after: str | None, max_length: int) -> Route:
        """See `swarm.client.routes.route_source.RouteSource`."""

        def plan(now: float) -> Route:
            return self.router.route(span, now, before=before, after=after, cache_tokens=max_length)

        return await self._planned(plan)

    async def split(self, span: Span, token_counts: Sequence[int]) -> tuple[BatchShare, ...]:
        """Portions of a batch without a session. Raises `MissingBlocks`."""
        return await self._planned(lambda now: self.router.split(span, token_counts, now, self._random))

    async def _planned(self, plan: Callable[[float], T]) -> T:
        """What `plan` makes of the picture now; of a new one, if blocks are missing and it is not new already."""
        await self._prepare()
        try:
            return plan(time.monotonic())
        except MissingBlocks:
            if time.monotonic() - self._fetched < MIN_REFRESH_INTERVAL_S:
                raise
            await self.refresh()  # a server may have come since
            return plan(time.monotonic())

    async def refresh(self) -> None:
        """Look at the swarm again; pings go on in the background. Several callers share one look.

        A look that fails, or takes too long, leaves the picture as it is.
        """
        looking = self._look()
        await asyncio.wait({looking}, timeout=REFRESH_TIMEOUT_S)
        if looking.done() and not looking.cancelled() and (error := looking.exception()) is not None:
            logger.warning("looking at the swarm failed: %r", error)

    def report_failure(self, peer_id: str, error: Exception) -> None:
        """Keep the peer out of routes for a while."""
        reason = next((reason for kind, reason in _FAILURES if isinstance(error, kind)), PeerFailure.FAULT)
        now, health = time.monotonic(), self.router.health
        is_known = health.is_banned(peer_id, now) and reason in health.reasons(peer_id)
        until = health.record_failure(peer_id, reason, now)
        logger.debug("…%s %s; avoided for %.0f s: %s", peer_id[-6:], reason.value, until - now, error)
        if not is_known:  # another session has seen it before
            self._tell(PeerAvoided(peer_id, reason.value, until - now))

    def report_success(self, peer_id: str) -> None:
        """The peer works."""
        self.router.health.record_success(peer_id, time.monotonic())

    def timeout_factor(self, peer_id: str) -> float:
        """Twice for each time that it lately did not answer in time: it may be slow, not dead."""
        return 2.0 ** self.router.health.reasons(peer_id).count(PeerFailure.TIMED_OUT)

    def report_route(self, route: Route) -> None:
        """A session goes by this route from now on."""
        if self._config.show_route:
            print(describe_route(route, self._config.local_blocks))

    async def close(self) -> None:
        """End what runs in the background."""
        tasks = [task for task in (self._keeper, self._pinging, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self) -> None:
        now = time.monotonic()
        self._used = now
        first = self._fetched == float("-inf")
        # The keeper renews the picture of a client that is in use; an older one is that of a client that slept.
        if first:
            await self.refresh()
        elif now - self._fetched > 2 * self._config.refresh:
            await asyncio.wait({self._look()}, timeout=STALE_REFRESH_TIMEOUT_S)
        if first and self._pinging is not None:
            await asyncio.wait({self._pinging}, timeout=FIRST_PING_TIMEOUT_S)

    def _look(self) -> asyncio.Task[None]:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
            # Whoever waits for it hears of its failure; nobody may be waiting any more.
            self._renewing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._renewing

    async def _renew(self) -> None:
        announced = await fetch_servers(self._peer.dht, self._model, self._blocks.end)
        found = compatible_servers(announced, self._revision, self._digests, self._config.quant)
        self.router.update(found.servers, found.excluded)
        _ = self.router.snapshot.links  # read now what is announced, so that no failover has to
        self._fetched = time.monotonic()
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.get_running_loop().create_task(self._ping())

    async def _ping(self) -> None:
        candidates = self.router.candidates_to_ping(self._blocks, time.monotonic(), self._random)
        found = await ping_many(self._peer, candidates)
        self.router.record_round_trips(found, time.monotonic())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._config.refresh)
            if time.monotonic() - self._used > IDLE_TIMEOUT_S:
                continue
            await self.refresh()
