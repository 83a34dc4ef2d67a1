"""The loop that asks every update period whether this server should move; `move_decision` decides."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from swarm.data_structures import Mobility, ServerInfo, Span
from swarm.errors import DhtError
from swarm.server.placement.move_decision import MoveHistory, MovePolicy, decide_move

logger = logging.getLogger(__name__)

MoveServer = Callable[[Span, bool], Awaitable[None]]


class MoveLoop:
    """Checks regularly whether the server should move, and moves it.

    The phase is random, so that servers that started together do not all check at the same moment.

    Args:
        peer_id: this server's.
        blocks: number of blocks of the model.
        fetch: fetches the announcements.
        move: moves the server to other blocks; its second argument says whether that closes a gap.
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

    @property
    def mobility(self) -> Mobility:
        """Whether this server would move, as announced."""
        cooling = self._history.is_cooling_down(time.monotonic(), self._policy)
        return Mobility.COOLING if cooling else Mobility.FREE

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
        decision = decide_move(servers, self._peer_id, self._blocks, time.monotonic(), self._history, self._policy)
        self._history = decision.history
        if decision.span is None:
            logger.debug("Staying: %s", decision.reason)
            return
        extra = {"blocks": str(decision.span), "closes_gap": decision.closes_gap}
        logger.info("Moving to blocks %s: %s", decision.span, decision.reason, extra=extra)
        await self._move(decision.span, decision.closes_gap)
