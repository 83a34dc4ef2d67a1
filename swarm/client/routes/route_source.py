"""What sessions and batches need to know of the swarm, and how they wait for blocks that no server holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from swarm.client.routes.events import BlocksMissing, EventListener, ignore_events
from swarm.common.dtypes import not_finite_help
from swarm.data_structures import Hop, Route, Span
from swarm.errors import AdapterRefused, CacheFull, MissingBlocks, NotFiniteOutputs, TooLong, WrongDtype, sanitize_text
from swarm.routing.router import Alternative

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_PERIOD_S = 1.0
"""Seconds between looks for new servers while blocks are missing."""

MAX_WAIT_FOR_ROOM_S = 60.0
"""Seconds that a session waits for room in the caches of servers, however long it would wait for missing blocks."""

MIN_ROUTES_TRIED = 3
"""Routes that are tried at least, however short the time-out for missing blocks is."""


class RouteSource(Protocol):
    """Finds routes, and learns how their servers did.

    Attributes:
        missing_blocks_timeout: seconds to wait for blocks that no server holds.
    """

    missing_blocks_timeout: float

    async def route(
        self,
        span: Span,
        before: str | None,
        after: str | None,
        max_length: int,
        avoid: frozenset[str] = frozenset(),
    ) -> Route:
        """A route over `span` between two servers (None: this client). Raises `MissingBlocks`.

        Args:
            avoid: servers that it must not use.
        """

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> Alternative | None:
        """The best route over the same blocks without these servers, from what is known now; None if there is none."""

    def offers(self, hop: Hop) -> bool:
        """Whether a server is known to hold these blocks, and is not avoided."""

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None:
        """A server took so long for a step, as this client has measured it."""

    def note_overtaken(self, hop: Hop, seconds: float, tokens: int) -> None:
        """A server took at least so long for a step, and others were quicker although they began later."""

    async def refresh(self) -> None:
        """Read the announcements of the swarm again."""

    def report_failure(self, peer_id: str, error: Exception) -> None:
        """The server failed: keep it out of routes for a while."""

    def report_success(self, peer_id: str) -> None:
        """The server works."""

    def timeout_factor(self, peer_id: str) -> float:
        """How many times longer than it announces the server should be given, because it was too slow before."""

    def may_push(self, before: str, after: str) -> bool:
        """Whether one server should push to the other; if not, this client hands its outputs on."""

    def distrust_link(self, before: str, after: str) -> None:
        """One of two servers lied about what passed between them: keep them apart for a while."""

    def report_route(self, route: Route) -> None:
        """A session goes by this route from now on."""


class MissingBlocksWait:
    """Waits for servers of missing blocks, for `RouteSource.missing_blocks_timeout` seconds from its making on.

    Servers that are there but full are waited for no longer than `MAX_WAIT_FOR_ROOM_S`.
    """

    def __init__(self, routes: RouteSource, emit: EventListener = ignore_events) -> None:
        self._routes = routes
        self._emit = emit
        self._began = time.perf_counter()
        self._announced = False

    def is_over(self, error: Exception | None = None) -> bool:
        """Whether to give up. `error`: why the servers that were tried could not be used."""
        return time.perf_counter() >= self._began + self._limit(error)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, which is repeated while it raises `MissingBlocks`, until the time is over."""
        while True:
            try:
                return await attempt()
            except MissingBlocks as missing:
                await self.wait(missing)

    async def wait(self, missing: MissingBlocks, error: Exception | None = None) -> None:
        """Wait a little and refresh the view of the swarm. Raises `missing` when the time is over."""
        if self.is_over(error):
            raise missing from None
        limit = self._limit(error)
        if not self._announced:
            logger.warning("%s Waiting up to %.0f s.", missing, limit)
            self._emit(BlocksMissing(missing.blocks))
            self._announced = True
        await asyncio.sleep(min(REFRESH_PERIOD_S, max(0.0, self._began + limit - time.perf_counter())))
        await self._routes.refresh()

    def _limit(self, error: Exception | None) -> float:
        limit = self._routes.missing_blocks_timeout
        return min(limit, MAX_WAIT_FOR_ROOM_S) if isinstance(error, CacheFull) else limit


def not_finite(hop: Hop) -> NotFiniteOutputs:
    """What to tell the user of a server that made NaN or infinity of finite inputs."""
    server, dtype = hop.server, sanitize_text(hop.server.compute_dtype)
    return NotFiniteOutputs(
        f"server {server.short_id} (blocks {hop.span}) computed NaN or infinity in {dtype} from finite inputs; "
        f"{not_finite_help(dtype)}. No other server does better"
    )


def is_worth_another_server(error: Exception) -> bool:
    """Whether another server should be asked after this error.

    Not if every server would refuse: a sequence that may be too long for all, outputs that the wire format cannot hold,
    an adapter that does not fit the blocks. Whatever else could be wrong with a request was checked before it was sent,
    so a server that refuses it errs or lies. One server's word is taken for these only if there is no other one to ask;
    if another one does what the first refused, the first is reported.
    """
    return not isinstance(error, TooLong | WrongDtype | AdapterRefused)
