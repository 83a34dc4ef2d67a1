"""The loop that asks every update period whether this server should move; `move_decision` decides."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from swarm.data_structures import Mobility, ServerInfo, Span
from swarm.errors import DhtError
from swarm.server.placement.move_decision import MoveHistory, MovePolicy, decide_move

logger = logging.getLogger(__name__)

MoveServer = Callable[[Span, bool], Awaitable[bool]]

PINNED_S = 3600.0
"""How long a server that had no room for the blocks that it should have moved to announces that it stays. Otherwise the
others would wait for it to close a gap."""


class MoveLoop:
    """Checks regularly whether the server should move, and moves it.

    The phase is random, so that servers that started together do not all check at the same moment.

    Args:
        peer_id: this server's.
        blocks: number of blocks of the model.
        fetch: fetches the announcements.
        move: moves the server to other blocks; its second argument says whether that closes a gap. Returns False if
            they do not fit here, so that nothing was changed.
        period: seconds between checks.
        load_seconds: how long loading took the last time.
    """

    def __init__(
        self,
        peer_id: str,
        blocks: int,
        fetch: Callable[[], Awaitable[Sequence[ServerInfo]]],
        move: MoveServer,
        period: float,
        load_seconds: float,
    ) -> None:
        self._peer_id = peer_id
        self._blocks = blocks
        self._fetch = fetch
        self._move = move
        self._period = period
        self._policy = MovePolicy(load_seconds=load_seconds, check_period=period)
        self._history = MoveHistory(moved_at=time.monotonic())
        self._pinned_until = -math.inf

    @property
    def mobility(self) -> Mobility:
        """Whether this server would move, as announced."""
        if self._is_pinned:
            return Mobility.PINNED
        cooling = self._history.is_cooling_down(time.monotonic(), self._policy)
        return Mobility.COOLING if cooling else Mobility.FREE

    @property
    def _is_pinned(self) -> bool:
        return time.monotonic() < self._pinned_until

    async def run(self) -> None:
        """Check until cancelled. Ends only with an error of `move`, after which there is nothing to serve."""
        await asyncio.sleep(self._period * random.random())
        while True:
            try:
                servers = await self._fetch()
            except DhtError as error:
                logger.debug("%s; trying again at the next check", error)
            else:
                await self._check(servers)
            await asyncio.sleep(self._period)

    async def _check(self, servers: Sequence[ServerInfo]) -> None:
        if self._is_pinned:
            return
        decision = decide_move(servers, self._peer_id, self._blocks, time.monotonic(), self._history, self._policy)
        self._history = decision.history
        if decision.span is None:
            logger.debug("Staying: %s", decision.reason)
            return
        extra = {"blocks": str(decision.span), "closes_gap": decision.closes_gap}
        logger.info("Moving to blocks %s: %s", decision.span, decision.reason, extra=extra)
        if not await self._move(decision.span, decision.closes_gap):
            self._pinned_until = time.monotonic() + PINNED_S
