"""Other servers for one micro-batch, when those that it was to go to fail.

Nobody waits for a straggler twice: a server that failed one micro-batch is left alone by all others of the same pass.
It is reported once for all that it had of them at that time, or each of them would double the time of its ban.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from swarm.client.routes.route_source import (
    MIN_ROUTES_TRIED,
    MissingBlocksWait,
    RouteSource,
    is_worth_another_server,
)
from swarm.data_structures import Hop, Span
from swarm.errors import MissingBlocks, RemoteError

logger = logging.getLogger(__name__)


class Rerouter:
    """What has happened to one micro-batch so far.

    Args:
        planner: finds routes and remembers who failed.
        lost: servers that failed any micro-batch of the pass, and when; shared by all of them.
    """

    def __init__(self, planner: RouteSource, lost: dict[str, float]) -> None:
        self._planner = planner
        self._lost = lost
        self._tries = 0
        self._waiting = MissingBlocksWait(planner)
        self._asked = 0.0

    async def begin(self, hops: Sequence[Hop], span: Span) -> list[Hop]:
        """The hops over `span`, the first of which is going to be asked now; others if it was lost meanwhile."""
        fit = list(hops) if hops[0].server.peer_id not in self._lost else await self.around(span)
        self._asked = time.perf_counter()
        return fit

    async def after(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """Hops over `span`, which begins with the hop that was asked and failed.

        Raises the error if no other server would do better, or enough were tried, or `MissingBlocks`.
        """
        if not is_worth_another_server(error):
            raise error
        peer_id = hop.server.peer_id
        if self._asked >= self._lost.get(peer_id, -math.inf):
            self._lost[peer_id] = time.perf_counter()
            self._planner.report_failure(peer_id, error)
            logger.info("%s; trying another server", error)
        self._tries += 1
        enough = self._tries >= MIN_ROUTES_TRIED and self._waiting.is_over
        hops = await self.around(span)
        if enough:
            raise error
        return hops

    async def around(self, span: Span) -> list[Hop]:
        """Hops over `span`. Waits for servers as a session does; raises `MissingBlocks`."""
        while True:
            try:
                return list((await self._planner.route(span, None, None, 0)).hops)
            except MissingBlocks as missing:
                await self._waiting.wait(missing)
