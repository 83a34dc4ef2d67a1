"""New routes for one micro-batch when a server of its route fails.

A server that failed one micro-batch gets no other micro-batch of the same pass. It is reported to the planner once for
all micro-batches that it held at that moment: each further report would double the time for which it is avoided.
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
    not_finite,
)
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Hop, Span
from swarm.errors import CacheFull, MissingBlocks, NotFiniteOutputs, RemoteError, SuspectOutputs

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
        self._refuser: tuple[Hop, RemoteError] | None = None
        """Who refused what every server would refuse, it says, or made NaN of its inputs. Another one is asked now."""

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
        if isinstance(error, NotFiniteOutputs):
            error = not_finite(hop)
        if not is_worth_another_server(error) or isinstance(error, NotFiniteOutputs):
            return await self._second_opinion(hop, error, span)
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

    def on_success(self, hop: Hop) -> None:
        """A server did what was asked. If another one refused that before, it alone thinks so."""
        self._planner.report_success(hop.server.peer_id)
        if self._refuser is not None and hop.span.end >= self._refuser[0].span.end:
            refuser, error = self._refuser
            self._refuser = None
            self._report(refuser, error)

    async def leave_suspect(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """Hops over `span` without the server of `hop`, from whose outputs two others made NaN. Raises `error` if there
        are none."""
        self._refuser = None
        hops = await self._hops_without(hop, error, span)
        self._report(hop, SuspectOutputs(f"{describe_hop(hop)} answered with outputs from which others made NaN"))
        return hops

    async def _second_opinion(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        """Hops that do without a server that refused. Raises its error if they agree, or if there are none."""
        peer_id = hop.server.peer_id
        if self._refuser is not None and self._refuser[0].server.peer_id != peer_id:
            raise error
        self._refuser = hop, error
        return await self._hops_without(hop, error, span)

    async def _hops_without(self, hop: Hop, error: RemoteError, span: Span) -> list[Hop]:
        try:
            route = await self._planner.route(span, None, None, 0, frozenset({hop.server.peer_id}))
        except MissingBlocks:
            raise error from None
        return list(route.hops)

    def _report(self, hop: Hop, error: RemoteError) -> None:
        """Report a server, unless another micro-batch of the pass has done so."""
        if hop.server.peer_id not in self._lost:
            self._lost[hop.server.peer_id] = time.perf_counter()
            self._planner.report_failure(hop.server.peer_id, error)
            logger.info("%s; using other servers", error)

    async def find_hops(self, span: Span) -> list[Hop]:
        """Hops over `span`. Waits for servers of missing blocks as a session does, then raises `MissingBlocks`."""
        route = await self._waiting.retry(lambda: self._planner.route(span, None, None, 0))
        return list(route.hops)
