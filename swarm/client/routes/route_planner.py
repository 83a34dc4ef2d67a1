"""Plans a client's routes from a snapshot of the swarm, which it refreshes in the background.

Routes are planned from the current snapshot, so that no token waits for the DHT. The snapshot is refreshed first only
if it offers no route, or if it is too old.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from swarm.client.config import ClientConfig, ModelIdentity
from swarm.client.local_blocks import describe_route
from swarm.client.routes.events import EventListener, PeerAvoided, ignore_events
from swarm.client.routes.route_source import RouteSource
from swarm.common.console import print_line
from swarm.data_structures import Hop, Route, ServerInfo, ServerState, Span
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.errors import (
    CacheFull,
    DhtError,
    MissingBlocks,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RequestRefused,
    ServerClosing,
    SuspectOutputs,
    WrongSpan,
    sanitize_text,
)
from swarm.routing.batch_split import BatchShare
from swarm.routing.compatibility import compatible_servers
from swarm.routing.peer_health import PeerFailure
from swarm.routing.router import Alternative, Router
from swarm.transport.p2p import Peer
from swarm.transport.ping import ping_many

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PING_TIMEOUT_S = 1.0
"""Seconds that the first route waits for pings, because a session keeps its route."""

REFRESH_TIMEOUT_S = 15.0
"""Seconds after which a refresh is given up; the DHT has a shorter limit of its own."""

STALE_REFRESH_TIMEOUT_S = 2.0
"""Seconds to wait for a refresh while there is an old snapshot, which may still be right."""

MIN_REFRESH_INTERVAL_S = 1.0
"""Seconds after a refresh before missing blocks are a reason for another one."""

IDLE_TIMEOUT_S = 120.0
"""Seconds without a request after which a client hardly refreshes any more."""

IDLE_REFRESH_PERIOD_S = 600.0
"""Seconds between refreshes of an idle client: it gets to know new nodes of the DHT before all old ones have gone."""

_FAILURES: tuple[tuple[type[Exception], PeerFailure], ...] = (
    (PeerTimeout, PeerFailure.TIMED_OUT),
    (PeerLost, PeerFailure.UNREACHABLE),
    (NotFiniteOutputs, PeerFailure.SUSPECTED),  # perhaps the one before, or its own inputs, left it no choice
    (ProtocolViolation, PeerFailure.WRONG_ANSWER),
    (SuspectOutputs, PeerFailure.SUSPECTED),
    (CacheFull, PeerFailure.CACHE_FULL),
    (ServerClosing, PeerFailure.CLOSING),
    (WrongSpan, PeerFailure.CLOSING),  # it has moved to other blocks since its last announcement
    (RequestRefused, PeerFailure.REFUSED),
)


class RoutePlanner(RouteSource):
    """Plans the routes of one client. For the network thread.

    Args:
        peer: reads announcements and pings servers.
        config: the configuration of the client.
        model: the model that servers have to offer.
        emit: receives an event for every server that is avoided.
    """

    def __init__(
        self, peer: Peer, config: ClientConfig, model: ModelIdentity, emit: EventListener = ignore_events
    ) -> None:
        network = config.network
        given = network.allowed_servers
        allowed = given if given is None or isinstance(given, AbstractSet) else frozenset(given)
        self.missing_blocks_timeout = network.wait_for_blocks
        self.router = Router(allowed, frozenset(network.blocked_servers))
        self._peer = peer
        self._config = config
        self._model = model
        self._emit = emit
        self._refreshed_at = self._used_at = float("-inf")
        self._random = random.Random()
        self._ping_task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._periodic_task = asyncio.get_running_loop().create_task(self._refresh_periodically())

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers that this client may use, from the current snapshot."""
        return self.router.snapshot.servers

    async def route(
        self,
        span: Span,
        before: str | None,
        after: str | None,
        max_length: int,
        avoid: frozenset[str] = frozenset(),
    ) -> Route:

        def plan(now: float) -> Route:
            return self.router.route(span, now, before=before, after=after, avoid=avoid, cache_tokens=max_length)

        return await self._plan(plan)

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> Alternative | None:
        return self.router.alternative(current, time.monotonic(), before, after, max_length)

    def offers(self, hop: Hop) -> bool:
        return self.router.offers(hop, time.monotonic())

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None:
        self.router.note_step(hop, seconds, tokens, time.monotonic())

    def note_overtaken(self, hop: Hop, seconds: float, tokens: int) -> None:
        self.router.note_step(hop, seconds, tokens, time.monotonic(), overtaken=True)

    async def split(self, span: Span, token_counts: Sequence[int]) -> tuple[BatchShare, ...]:
        """See `SwarmConnection.split_batch`. Raises `MissingBlocks` at once."""
        return await self._plan(lambda now: self.router.split(span, token_counts, now, self._random))

    async def _plan(self, plan: Callable[[float], T]) -> T:
        """The result of `plan` for the current snapshot. If blocks are missing, an older one is refreshed first."""
        await self._require_snapshot()
        try:
            return plan(time.monotonic())
        except MissingBlocks:
            if time.monotonic() - self._refreshed_at < MIN_REFRESH_INTERVAL_S:
                raise
            await self.refresh()  # a server may have come since
            return plan(time.monotonic())

    async def refresh(self) -> None:
        """Read the announcements again, and ping servers in the background. Concurrent callers share one refresh.

        A refresh that fails or takes too long leaves the snapshot as it is.
        """
        task = self._start_refresh()
        await asyncio.wait({task})
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            unread = f"reading the swarm's announcements failed: {error}"
            if unread != self.router.unread:  # waiting requests try twice a second
                logger.warning("%s", unread)
            self.router.unread = unread

    def report_failure(self, peer_id: str, error: Exception) -> None:
        reason = next((reason for kind, reason in _FAILURES if isinstance(error, kind)), PeerFailure.FAULT)
        now, health = time.monotonic(), self.router.health
        is_known = health.is_banned(peer_id, now) and reason in health.reasons(peer_id)
        until = health.record_failure(peer_id, reason, now)
        if reason.counts_as_strike:
            self._peer.dht.served.discard(peer_id)
        logger.debug("…%s %s; avoided for %.0f s: %s", peer_id[-6:], reason.value, until - now, error)
        if not is_known:  # else another session has reported it already
            self._emit(PeerAvoided(peer_id, reason.value, until - now))

    def report_success(self, peer_id: str) -> None:
        self.router.health.record_success(peer_id, time.monotonic())
        self._peer.dht.served.add(peer_id)

    def timeout_factor(self, peer_id: str) -> float:
        """2 to the power of the recent timeouts of the server: it may be slow, not dead."""
        return 2.0 ** self.router.health.reasons(peer_id).count(PeerFailure.TIMED_OUT)

    def may_push(self, before: str, after: str) -> bool:
        return self.router.may_push(before, after, time.monotonic())

    def distrust_link(self, before: str, after: str) -> None:
        self.router.links.distrust(before, after, time.monotonic())

    def report_route(self, route: Route) -> None:
        """Print the route that a session takes, if the configuration asks for it."""
        if self._config.show_route:
            print_line(describe_route(route, self._config.local_blocks))

    async def close(self) -> None:
        """Cancel the background tasks."""
        tasks = [task for task in (self._periodic_task, self._ping_task, self._refresh_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _require_snapshot(self) -> None:
        """Refresh the snapshot if there is none, or if it is too old."""
        now = time.monotonic()
        self._used_at = now
        is_first = self._refreshed_at == float("-inf")
        if is_first:
            await self.refresh()
        # While a client is in use, its snapshot is refreshed periodically; this one has been idle.
        elif now - self._refreshed_at > 2 * self._config.refresh_period:
            await asyncio.wait({self._start_refresh()}, timeout=STALE_REFRESH_TIMEOUT_S)
        if is_first and self._ping_task is not None:
            await asyncio.wait({self._ping_task}, timeout=FIRST_PING_TIMEOUT_S)

    def _start_refresh(self) -> asyncio.Task[None]:
        """The refresh in progress, or a new one."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_snapshot())
            # Read the exception, or asyncio would log an error if no caller waits for the task any more.
            self._refresh_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._refresh_task

    async def _refresh_snapshot(self) -> None:
        model, network = self._model, self._config.network
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                announced = await fetch_servers(self._peer.dht, model.name, model.blocks)
                is_served = any(server.state is not ServerState.OFFLINE for server in announced)
                others = await self._other_models() if not is_served else []
        except TimeoutError:
            raise DhtError(f"no answer within {REFRESH_TIMEOUT_S:.0f} s; the servers known before are used") from None
        found = compatible_servers(announced, model.revision, model.digests, network.weight_forms, network.exact)
        self.router.update(found.servers, found.excluded, others)
        _ = self.router.snapshot.links  # computed now, so that no failover has to wait for it
        self._refreshed_at = time.monotonic()
        if self._ping_task is None or self._ping_task.done():
            self._ping_task = asyncio.get_running_loop().create_task(self._ping_servers())

    async def _other_models(self) -> list[str]:
        """The models that the swarm serves, for a client whose model no server announces."""
        try:
            listed = await fetch_models(self._peer.dht)
        except DhtError:
            return []
        own = self._model
        named = [one for one in listed if (one.name, one.blocks) != (own.name, own.blocks)]
        return [
            sanitize_text(one.name) + (f" with {one.blocks} blocks, not {own.blocks}" if one.name == own.name else "")
            for one in sorted(named, key=lambda one: one.name != own.name)
        ]

    async def _ping_servers(self) -> None:
        candidates = self.router.candidates_to_ping(Span(0, self._model.blocks), time.monotonic(), self._random)
        found = await ping_many(self._peer, candidates)
        self.router.record_round_trips(found, time.monotonic())

    async def _refresh_periodically(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._config.refresh_period)
            now = time.monotonic()
            if now - self._used_at <= IDLE_TIMEOUT_S or now - began >= IDLE_REFRESH_PERIOD_S:
                began = now
                await self.refresh()
