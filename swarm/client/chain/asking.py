"""Asking other servers beside one that is late, or slow all the time: when, which, and how often (see `patience`)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from swarm.client.chain.failover import vacancy_at
from swarm.client.chain.hop_opening import CacheContents, HopOpener, route_of
from swarm.client.chain.patience import (
    LOOK_INTERVAL_S,
    MIN_MEASURED_STEPS,
    AskAllowance,
    first_late,
    is_worth_leaving,
    none_late_before,
)
from swarm.client.chain.standby import Standby, see_out
from swarm.client.hops.hop_session import HopSession
from swarm.client.hops.session_constants import SessionContext
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop

logger = logging.getLogger(__name__)


class Asking:
    """The servers that one session asks beside those of its route. It asks for one place at a time.

    Args:
        context: the constants of the session.
        opener: opens hops at the others.
        contents: what the caches of some hops have to hold together, if they are filled up to some step at most.
        on_change: called after anything has happened.
        stop_pushes: has this client deliver what was pushed to a hop, until no step is under way.

    Attributes:
        standby: those that are asked now.
        allowance: how often the session may still ask.
    """

    def __init__(
        self,
        context: SessionContext,
        opener: HopOpener,
        contents: Callable[[range, int], CacheContents],
        on_change: Callable[[], None],
        stop_pushes: Callable[[int], Awaitable[None]],
    ) -> None:
        self.standby: Standby | None = None
        self.allowance = AskAllowance()
        self._context = context
        self._opener = opener
        self._contents = contents
        self._on_change = on_change
        self._stop_pushes = stop_pushes
        self._background: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._looked_at = time.perf_counter()

    @property
    def has_answered(self) -> bool:
        """Whether the others are to take a place now."""
        return self.standby is not None and self.standby.is_wanted

    def unneeded(self, settled: int) -> int:
        """Number of the last step up to `settled` that the others do not need singly any more."""
        return settled if self.standby is None else min(settled, self.standby.contents.done)

    async def ask_if_late(self, hops: Sequence[HopSession], refillable: int) -> float | None:
        """A time before which no answer is late; None if one was, and others were asked now.

        Args:
            hops: the session's, in the order of the route.
            refillable: see `LinkedHops.repair`.
        """
        if self.standby is not None:
            return math.inf
        progress = [hop.progress for hop in hops]
        earliest = none_late_before(progress)
        if earliest > time.perf_counter():
            return earliest
        late = first_late(progress, [hop.refill_seconds for hop in hops])
        if late is None:
            return math.inf
        if late.time > time.perf_counter():
            return late.time
        slow = progress[late.index]
        slow.on_asked(late.number)
        if hops[late.index].is_sound and self.allowance.take():
            self._ask(hops, late.index, refillable, late.number)
            if slow.delivered < late.number <= slow.received:
                await self._stop_pushes(late.index)  # what was pushed may be lost, so this client delivers it
        return None

    def look_around(self, hops: Sequence[HopSession], refillable: int) -> None:
        """Take note of how long the servers took. If one is slower all the time than others would be, ask those."""
        for hop in hops:
            measured = hop.progress.clock.take_measured()
            if measured is not None:
                self._context.routes.note_step(hop.hop, *measured)
        now = time.perf_counter()
        if now - self._looked_at < LOOK_INTERVAL_S:
            return
        self._looked_at = now
        for index, hop in enumerate(hops):
            if self.standby is None and hop.is_sound and hop.progress.clock.measured >= MIN_MEASURED_STEPS:
                self._ask(hops, index, refillable, None)

    def _ask(self, hops: Sequence[HopSession], index: int, refillable: int, number: int | None) -> None:
        """Ask the best other servers for what hop `index` does, if that is worth it.

        Args:
            number: the step whose answer is late; None if the server is only slow.
        """
        vacancy = vacancy_at(hops, index, lambda which: self._contents(which, refillable))
        late = hops[vacancy.which.start : vacancy.which.stop]
        length = self._context.max_length
        found = self._context.routes.alternative(route_of(late), vacancy.before, vacancy.after, length)
        if found is None:
            return
        if number is None:
            steps, refill = late[0].progress.clock.measured, late[0].refill_seconds
            if not is_worth_leaving(found.current_seconds, found.seconds, steps, refill):
                return
        logger.info("%s is %s; others are asked", describe_hop(late[0].hop), "slow" if number is None else "late")
        self.standby = Standby(self._opener, late, vacancy, found.route, number, self._on_change)

    def on_reply(self, hop: HopSession, outputs: PackedHidden) -> bool:
        """A hop has answered; whether it is one of those that are asked."""
        if self.standby is None or hop not in self.standby.hops:
            return False
        self.standby.on_reply(hop, outputs)
        return True

    def on_change(self) -> None:
        """Something has happened at some hop."""
        if self.standby is not None:
            self.standby.on_change()

    def see_out(self, left: Sequence[HopSession]) -> None:
        """Others have taken the place of these hops, which were late or slow."""
        now = time.perf_counter()
        for hop in left:
            hop.progress.on_replaced()
            if hop.progress.awaited is not None:
                tokens = hop.progress.steps.tokens([hop.progress.awaited])
                self._context.routes.note_overtaken(hop.hop, hop.progress.clock.waited(now), tokens)
        self._start(see_out(self._context.routes, left, self._closing))

    def drop(self) -> None:
        """Free the servers that are asked."""
        if self.standby is not None:
            standby, self.standby = self.standby, None
            self._start(standby.close())

    async def close(self) -> None:
        """Free all servers."""
        self.drop()
        self._closing.set()
        await asyncio.gather(*self._background)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
