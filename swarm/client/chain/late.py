"""Other servers for the place of one that is late, or slow all the time: when they are asked, and which stay.

To ask costs a replay of all that went in. So a session waits as long as such answers usually take, with their spread,
and then as long again as asking will cost: whatever happens after that, it has lost at most twice what it had to (the
rule for renting skis; Karlin, Manasse, Rudolph and Sleator, 1988). The same holds for a server that is merely slower
than another one would be: it is left when it has cost as much as leaving it.

A machine that is busy makes all servers late, or all but one. So what counts as late is stretched by as much as the
other servers of the route are slower than usual just now; and a session may ask once, and then for one step in fifty.

The others are opened and filled in the background, as a failover does it, while the late server is neither told nor
left:

    the late one answers first   the others are closed
    the others are filled first  they take its place, and it is not blamed; if it misses its deadline
                                 too, it is reported like any server that is overdue
    the late one fails           the others take its place as soon as they are filled
    steps are given up           the others are closed: their caches would have to be taken apart
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from swarm.client.chain.hop_opening import CacheContents, HopOpener, close_all, neighbors_of, route_of
from swarm.client.hops.hop_progress import NO_DEADLINE, HopProgress
from swarm.client.hops.hop_session import HopSession, SessionContext
from swarm.client.wire.reply_checks import describe_hop
from swarm.errors import PeerTimeout, RemoteError

logger = logging.getLogger(__name__)

ASKED_SHARE = 0.02
"""Share of its steps for which a session may ask other servers, beyond the first."""

MAX_ALLOWANCE = 2.0
"""Steps, one after the other, for which it may ask."""

MAX_SLOWNESS = 8.0
"""How many times longer than usual other servers excuse one that is late, at most."""

LOOK_INTERVAL_S = 5.0
"""Seconds between two looks for quicker servers: to plan a route takes as long as a few tokens in a large swarm."""

MIN_MEASURED_STEPS = 8
"""Steps after which it is known how long a server takes."""

MIN_GAIN = 0.5
"""Share of its time that a step has to save elsewhere: what was announced, or measured long ago, is not exact."""


@dataclass(frozen=True, slots=True)
class LateHop:
    """The hop whose answer is late first.

    Attributes:
        index: where it is in the route.
        number: the step that it has not answered.
        time: when other servers are asked, on the clock of the hops.
    """

    index: int
    number: int
    time: float


class AskAllowance:
    """How often a session may still ask other servers."""

    def __init__(self) -> None:
        self._left = 1.0

    def on_answered(self) -> None:
        """A step has come to its end."""
        self._left = min(self._left + ASKED_SHARE, MAX_ALLOWANCE)

    def take(self) -> bool:
        """Whether it may ask now; then that counts."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def none_late_before(hops: Sequence[HopProgress]) -> float:
    """A time before which no answer is late, or overdue. The rest makes that later, and takes longer to find out."""
    return min([min(hop.clock.late_from, hop.clock.deadline) for hop in hops])


def first_late(hops: Sequence[HopProgress], refill_seconds: Sequence[float]) -> LateHop | None:
    """The hop for which others are asked first, if none answers before; None if no answer is awaited.

    Others are asked at most once for each step, and never for a step that a later server has answered already.

    Args:
        hops: in the order of the route.
        refill_seconds: what it takes until another server has what each of them has.
    """
    found: LateHop | None = None
    for index, (hop, refill) in enumerate(zip(hops, refill_seconds, strict=True)):
        number = hop.awaited
        if number is None or number <= hop.asked or any(behind.replied >= number for behind in hops[index + 1 :]):
            continue
        time = hop.clock.late_at(common_slowness(hops, index)) + refill
        if time < NO_DEADLINE and (found is None or time < found.time):
            found = LateHop(index, number, time)
    return found


def common_slowness(hops: Sequence[HopProgress], index: int) -> float:
    """How many times slower than usual all hops but one are just now; 1 if one of them is not."""
    others = [hop.clock.slowness for other, hop in enumerate(hops) if other != index]
    return min(max(1.0, min(others, default=1.0)), MAX_SLOWNESS)


def is_worth_leaving(seconds: float, elsewhere: float, steps: int, refill_seconds: float) -> bool:
    """Whether a server that works has cost so much that it is better left.

    Args:
        seconds: what a step takes there.
        elsewhere: what it would take at other servers.
        steps: that it has computed.
        refill_seconds: what it takes until the others have what it has.
    """
    gain = seconds - elsewhere
    return gain >= MIN_GAIN * seconds and steps * gain >= refill_seconds


@dataclass(frozen=True, eq=False)
class Standby:
    """Servers that are filled to take the place of a hop.

    Attributes:
        replaced: the hop.
        number: the step whose answer is late; None if the server is slow all the time.
        done: number of the last step that they are filled with.
        began: when they were asked, in seconds of `time.perf_counter`.
        filling: opens and fills their hops.
    """

    replaced: HopSession
    number: int | None
    done: int
    began: float
    filling: asyncio.Task[tuple[list[HopSession], RemoteError | None]]

    @property
    def hops(self) -> list[HopSession]:
        """Those that can take the place now; empty until they are filled, and if that failed."""
        hops = self.filling.result()[0] if self.filling.done() else []
        return hops if all(hop.is_sound for hop in hops) else []

    @property
    def is_beaten(self) -> bool:
        """Whether the answer that was late has come."""
        progress = self.replaced.progress
        return self.number is not None and progress.replied >= self.number and progress.error is None


class Standbys:
    """The servers that one session asks beside those of its route. It asks for one place at a time.

    Args:
        context: the constants of the session.
        opener: opens hops at the others.
        contents: what the caches of some hops have to hold together.
        on_change: called after anything has happened.
        stop_pushes: has this client deliver what was pushed to a hop, until no step is under way.

    Attributes:
        current: those that are asked now.
        allowance: how often the session may still ask.
    """

    def __init__(
        self,
        context: SessionContext,
        opener: HopOpener,
        contents: Callable[[range], CacheContents],
        on_change: Callable[[], None],
        stop_pushes: Callable[[int], Awaitable[None]],
    ) -> None:
        self.current: Standby | None = None
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
    def is_ready(self) -> bool:
        """Whether others can take a place now."""
        return self.current is not None and bool(self.current.hops)

    def unneeded(self, settled: int) -> int:
        """Number of the last step up to `settled` that the others do not need singly any more."""
        return settled if self.current is None else min(settled, self.current.done)

    async def ask_if_late(self, hops: Sequence[HopSession]) -> float | None:
        """A time before which no answer is late; None if one is late now. Then others are asked, if they may be and if
        there are any, and the chain has to look again.

        Args:
            hops: the session's, in the order of the route.
        """
        if self.current is not None:
            return math.inf
        now, progress = time.perf_counter(), [hop.progress for hop in hops]
        earliest = none_late_before(progress)
        if earliest > now:
            return earliest
        late = first_late(progress, [hop.refill_seconds for hop in hops])
        if late is None:
            return math.inf
        if late.time > now:
            return late.time
        slow = progress[late.index]
        slow.on_asked(late.number)
        if hops[late.index].is_sound and self.allowance.take():
            self._ask(hops, late.index, late.number)
            if slow.delivered < late.number <= slow.received:
                await self._stop_pushes(late.index)  # what was pushed may be lost, so this client delivers it
        return None

    def ask_if_slow(self, hops: Sequence[HopSession]) -> None:
        """Record how long the servers took. If others would be quicker than one of them all the time, ask those."""
        for hop in hops:
            measured = hop.progress.clock.take_measured()
            if measured is not None:
                self._context.routes.note_step(hop.hop, *measured)
        now = time.perf_counter()
        if now - self._looked_at < LOOK_INTERVAL_S:
            return
        self._looked_at = now
        for index, hop in enumerate(hops):
            if self.current is None and hop.is_sound and hop.progress.clock.measured >= MIN_MEASURED_STEPS:
                self._ask(hops, index, None)

    def _ask(self, hops: Sequence[HopSession], index: int, number: int | None) -> None:
        """Ask the best other servers for what hop `index` does, if that is worth it.

        Args:
            number: the step whose answer is late; None if the server is only slow.
        """
        late, place = hops[index], range(index, index + 1)
        found = self._context.routes.alternative(route_of([late]), *neighbors_of(hops, place), self._context.max_length)
        if found is None:
            return
        steps = late.progress.clock.measured
        if number is None and not is_worth_leaving(found.current_seconds, found.seconds, steps, late.refill_seconds):
            return
        logger.info("%s is %s; others are asked", describe_hop(late.hop), "slow" if number is None else "late")
        contents = self._contents(place)
        filling = asyncio.get_running_loop().create_task(self._opener.prepare(found.route, contents))
        on_change = self._on_change
        filling.add_done_callback(lambda _: on_change())
        self.current = Standby(late, number, contents.done, time.perf_counter(), filling)

    def take_if_ready(self, hops: Sequence[HopSession]) -> Standby | None:
        """The servers that are to take a place now; None if there are none. Closes those that are not needed any more,
        because the late answer has come, or they failed."""
        standby = self.current
        if standby is None:
            return None
        if standby.is_beaten or (standby.filling.done() and not (standby.hops and standby.replaced in hops)):
            self.drop()
            return None
        if not standby.filling.done():
            return None
        self.current = None
        return standby

    def retire(self, late: HopSession, was_slow: bool) -> None:
        """Others have taken the place of a hop that works.

        Args:
            was_slow: it was slow all the time, as the measurements before say already.
        """
        progress = late.progress
        progress.on_replaced()
        if progress.awaited is not None and not was_slow:
            waited = progress.clock.waited(time.perf_counter())
            self._context.routes.note_overtaken(late.hop, waited, progress.outputs(progress.awaited).tokens)
        self._start(self._close_late(late))

    async def _close_late(self, late: HopSession) -> None:
        """Free the session at a server that was late. If it misses its deadline too, it is reported."""
        progress, number = late.progress, late.progress.awaited
        if number is not None and progress.error is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(progress.deadline - time.perf_counter()):
                    await self._closing.wait()
            if progress.awaited == number and not self._closing.is_set():
                progress.on_failed(PeerTimeout(f"{describe_hop(late.hop)} has not answered in time"))
        if progress.error is not None:
            self._context.routes.report_failure(late.peer_id, progress.error)
        elif (measured := progress.clock.take_measured()) is not None:
            self._context.routes.note_step(late.hop, *measured)
        await close_all([late])

    def drop(self) -> None:
        """Close the servers that are asked."""
        if self.current is not None:
            filling, self.current = self.current.filling, None
            self._start(_discard(filling))

    async def close(self) -> None:
        """Close all servers."""
        self.drop()
        self._closing.set()
        await asyncio.gather(*self._background)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _discard(filling: asyncio.Task[tuple[list[HopSession], RemoteError | None]]) -> None:
    filling.cancel()
    await asyncio.wait({filling})
    if not filling.cancelled():
        await close_all(filling.result()[0])


class Alarm:
    """A timer that can be moved: calls a function at a time, on the clock of `time.perf_counter`.

    Attributes:
        time: when it rings; infinite if it does not.
    """

    def __init__(self) -> None:
        self.time = NO_DEADLINE
        self._ring: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, at: float, ring: Callable[[], object]) -> None:
        """Call `ring` then, unless it is stopped before."""
        self._ring = ring
        self.move(at)

    def move(self, at: float) -> None:
        """Ring at another time, if it was started and not stopped."""
        if self._ring is None:
            return
        self.time = at
        if self._timer is not None:
            self._timer.cancel()
        wait = at - time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(wait, self._ring) if at < NO_DEADLINE else None

    def stop(self) -> None:
        """Do not ring."""
        self._ring = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
