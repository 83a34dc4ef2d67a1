"""Other servers that compute what one is late with, in the background: whichever answers first goes on.

They are opened and filled as a failover would do it, and then handed the steps that the late one has not answered. The
late one is neither told nor left meanwhile. Both compute the same, so the first answer counts, and the session goes on
with the one that gave it:

    the others are first    they take the late one's place, with their answers. It is seen out: if it answers before its
                            deadline it was slow, and nobody hears of it; else it is reported like any that is overdue
    the late one is first   the others are closed
    the late one fails      the others take its place as soon as they are filled
    steps are given up      the others are closed: their caches would have to be taken apart
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from swarm.client.chain.failover import Vacancy
from swarm.client.chain.hop_opening import HopOpener, close_all
from swarm.client.hops.hop_session import HopSession
from swarm.client.hops.input_history import Step
from swarm.client.routes.route_source import RouteSource
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Route
from swarm.errors import PeerTimeout, RemoteError, SuspectOutputs

logger = logging.getLogger(__name__)


class Standby:
    """Servers that may take the place of a hop at another one.

    Attributes:
        late: the hops that are waited for.
        hops: those that may take their place; empty until they are open, and if they failed.
        outputs: what these have answered, by step.
        contents: what their caches were filled with.
        number: the step whose answer is late; None if the others are slow all the time. Then these take the place even
            if they have computed nothing more.
        began: when they were asked, in seconds of `time.perf_counter`.

    Args:
        opener: opens them.
        late: see above.
        vacancy: the place.
        route: where they are.
        number: see above.
        on_done: called when `is_done` has become true.
    """

    def __init__(
        self,
        opener: HopOpener,
        late: Sequence[HopSession],
        vacancy: Vacancy,
        route: Route,
        number: int | None,
        on_done: Callable[[], None],
    ) -> None:
        self.late = tuple(late)
        self.hops: list[HopSession] = []
        self.outputs: dict[int, PackedHidden] = {}
        self.contents = vacancy.contents
        self.number = number
        self.began = time.perf_counter()
        self._opener = opener
        self._answers: dict[HopSession, PackedHidden] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(route))
        self._task.add_done_callback(lambda _: on_done())

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end: with hops that can take the place, or without."""
        return self._task.done()

    @property
    def is_ahead(self) -> bool:
        """Whether it has answered a step that the others have not."""
        return bool(self.hops) and self.hops[-1].replied > min(hop.replied for hop in self.late)

    @property
    def is_wanted(self) -> bool:
        """Whether its hops should take the place, once it is done."""
        failed = any(hop.progress.error is not None for hop in self.late)
        is_ready = self.is_done and bool(self.hops) and all(hop.is_sound for hop in self.hops)
        return is_ready and (self.number is None or failed or self.is_ahead)

    @property
    def is_beaten(self) -> bool:
        """Whether the answer that was late has come."""
        return self.number is not None and all(hop.replied >= self.number for hop in self.late) and not self.is_ahead

    def on_reply(self, hop: HopSession, outputs: PackedHidden) -> None:
        """One of its hops has answered the step that it was handed."""
        self._answers[hop] = outputs
        self._changed.set()

    def on_change(self) -> None:
        """Something has happened at some hop."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until it is done."""
        await asyncio.wait({self._task})

    async def close(self) -> None:
        """Give it up."""
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._close_hops()

    async def _run(self, route: Route) -> None:
        try:
            self.hops, _ = await self._opener.prepare(route, self.contents)
            while self.hops and not self.is_ahead:
                step = self.late[0].history.following(self.hops[-1].replied)
                if step is None:
                    return
                await self._compute(step)
        except asyncio.CancelledError:  # by `close`; else the task would keep it, and with it this object
            logger.debug("the servers that were asked beside a late one are not needed")
        except RemoteError as error:
            logger.debug("the servers that were asked beside a late one are no use: %s", error)
            await self._close_hops()

    async def _compute(self, step: Step) -> None:
        """Have the hops compute a step, one after the other. Raises a `RemoteError`."""
        for hop in self.hops:
            hop.add_input(step)
            hop.expect(step.number, step.outputs)
            delivery = hop.begin_delivery(step)
            seconds = hop.progress.send_timeout(step.number)
            try:
                async with asyncio.timeout(seconds):
                    await delivery
                    while hop not in self._answers:
                        self._require_sound(hop)
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                error = PeerTimeout(f"{describe_hop(hop.hop)} has not answered within {seconds:.1f} s")
                raise self._opener.report_failure(hop, error) from None
            step = step.onward(self._answers.pop(hop))
        self.outputs[step.number] = step.hidden

    def _require_sound(self, hop: HopSession) -> None:
        """Raise what is wrong with a hop, and report it."""
        error = hop.progress.error
        claim = hop.claims.first()
        if error is None and claim is not None and claim[1].error is not None:
            error = SuspectOutputs(str(claim[1].error))
        if error is not None:
            known = error if isinstance(error, RemoteError) else RemoteError(f"{describe_hop(hop.hop)}: {error}")
            raise self._opener.report_failure(hop, known)
        if hop.progress.stale or hop.progress.leaving is not None or hop.progress.push_refused:
            raise RemoteError(f"{describe_hop(hop.hop)} cannot take over now")

    async def _close_hops(self) -> None:
        hops, self.hops = self.hops, []
        await close_all(hops)


async def see_out(routes: RouteSource, left: Sequence[HopSession], closing: asyncio.Event) -> None:
    """Free the session at a server whose place others have taken. One that answers before its deadline was slow; that
    is no fault. Else it is reported.

    Args:
        left: the successive hops there.
        closing: set when the whole session ends, whatever the server does.
    """
    hop = next((hop for hop in left if hop.progress.awaited is not None), left[0])
    progress, number = hop.progress, hop.progress.awaited
    if number is not None and progress.error is None:
        while progress.error is None and progress.awaited == number and not closing.is_set():
            left_seconds = progress.deadline - time.perf_counter()
            if left_seconds <= 0:
                progress.on_failed(PeerTimeout(f"{describe_hop(hop.hop)} has not answered in time"))
            with suppress(TimeoutError):
                async with asyncio.timeout(left_seconds):
                    await closing.wait()
    if progress.error is not None:
        routes.report_failure(hop.peer_id, progress.error)
    elif (measured := progress.clock.take_measured()) is not None:
        routes.note_step(hop.hop, *measured)
    await close_all(left)
