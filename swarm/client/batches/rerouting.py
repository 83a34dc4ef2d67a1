"""New routes for one micro-batch when a server of its route fails.

A server that failed one micro-batch gets no other micro-batch of the same pass. It is reported to the planner once for
all micro-batches that it held at that moment: each further report would double the time for which it is avoided.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from swarm.client.routes.route_source import MIN_ROUTES_TRIED, MissingBlocksWait, RouteSource, is_worth_another_server
from swarm.data_structures import Hop, Span
from swarm.errors import CacheFull, MissingBlocks, RemoteError

logger = logging.getLogger(__name__)


class Rerouter:
    """Finds other servers for one micro-batch.

    Args:
        planner: finds routes and remembers which servers failed.
        lost: servers that failed a micro-batch of the pass, and when; shared by all its micro-batches.
    """

    def __init__(self, planner: RouteSource, lost: dict[str, float]) -> None:
        self._planner = planner
        self._lost = lost
        self._tries = 0
        self._waiting = MissingBlocksWait(planner)
        self._requested_at = 0.0

    async def next_hops(self, hops: Sequence[Hop], span: Span) -> list[Hop]:
        """The hops over `span`, whose first one gets a request now: `hops`, or others if its server has been lost."""
        usable = list(hops) if hops[0].server.peer_id not in self._lost else await self.find_hops(span)
        self._requested_at = time.perf_counter()
        return usable

    async def replace(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """New hops over `span`, which begins with the hop that failed.

        Raises:
            RemoteError: `error`, if no other server would do better, or if enough servers were tried.
            MissingBlocks: no server offers the blocks.
        """
        if not is_worth_another_server(error):
            raise error
        peer_id = hop.server.peer_id
        if self._requested_at >= self._lost.get(peer_id, -math.inf):
            self._lost[peer_id] = time.perf_counter()
            self._planner.report_failure(peer_id, error)
            logger.info("%s; trying another server", error)
        self._tries += 1
        is_last_try = self._tries >= MIN_ROUTES_TRIED and self._waiting.is_over
        try:
            hops = await self.find_hops(span)
        except MissingBlocks:
            if isinstance(error, CacheFull):  # the blocks are there
                raise error from None
            raise
        if is_last_try:
            raise error
        return hops

    async def find_hops(self, span: Span) -> list[Hop]:
        """Hops over `span`. Waits for servers of missing blocks as a session does, then raises `MissingBlocks`."""
        route = await self._waiting.retry(lambda: self._planner.route(span, None, None, 0))
        return list(route.hops)
