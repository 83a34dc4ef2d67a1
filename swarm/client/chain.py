"""An open session over all hops of a route. Runs in the network loop; knows bytes, not tensors.

The first server is handed each step; the others get it from the server before. Every server also answers this client,
so that the record of each hop is complete (`swarm.client.failover` lives on it). What to do next is decided by
`swarm.client.progress`; here it is done.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress

from swarm.client.failover import Failover, Past, Planner, is_hop_lost
from swarm.client.hop_session import NOTHING_YET, HopSession, Outputs, whose
from swarm.client.packed import Manner, Packed
from swarm.client.progress import Deliver, Done, Mend, Wait, next_action
from swarm.client.record import Step
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import PeerSilent, SessionClosed
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)


class Chain:
    """One session's servers.

    Args:
        network: this client's place in the network.
        planner: finds routes and remembers who failed.
        manner: what is asked of every server.
        span: the blocks.
        max_length: tokens that a row may have.
    """

    def __init__(self, network: Network, planner: Planner, manner: Manner, span: Span, max_length: int) -> None:
        self._span = span
        self._failover = Failover(network, planner, manner, max_length, self._heard, self._changed)
        self._hops: list[HopSession] = []
        self._steps: dict[int, StepLayout] = {}
        """Steps that some hop may still have to answer."""
        self._number = 0
        self._committed = NOTHING_YET
        """The last step that came to its end. Records are folded up to here at most: a step behind may be given up."""
        self._hidden_size = 0
        self._outputs: Packed | None = None
        self._event = asyncio.Event()
        self._closed = False

    @property
    def route(self) -> Route:
        """The servers in use now."""
        return Route(tuple(hop.hop for hop in self._hops))

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Of the last step, one a hop; empty before the first."""
        return tuple(hop.timing for hop in self._hops if hop.timing is not None)

    async def open(self) -> None:
        """Find a route and reserve room on its servers. Raises `MissingBlocks` or a `RemoteError`."""
        self._hops = await self._failover.open(self._span)

    async def step(self, hidden: Packed, layout: StepLayout) -> Packed:
        """One step through all blocks, whatever happens to the servers meanwhile.

        Raises:
            MissingBlocks: nobody held some blocks for too long; `resume` or another step tries again.
            NotFinite, TooLong: the step itself is wrong. The session goes on with another one.
        """
        if self._closed:
            raise SessionClosed("this session is closed; open another one")
        hidden.check()
        number = self._number
        self._number += 1
        self._steps[number] = layout
        self._hidden_size, self._outputs = hidden.hidden_size, None
        for hop in self._hops:
            hop.expect(number, Outputs(hidden.tokens, hidden.hidden_size))
        # A copy, because the caller may change a tensor that the payload is a view of.
        kept = Packed(bytes(hidden.payload), hidden.tokens, hidden.hidden_size, hidden.wire, hidden.dtype)
        self._hops[0].record.add(Step(number, layout, kept))
        try:
            return await self._complete()
        except BaseException:
            self._give_up(number)
            raise

    async def resume(self) -> None:
        """Replace the servers that were lost now, instead of at the next step. Raises `MissingBlocks`."""
        for hop in list(self._hops):
            if hop.error is not None or hop.leaving is not None:
                await self._mend(self._hops.index(hop))

    async def close(self) -> None:
        """Free the session everywhere."""
        self._closed = True
        await asyncio.gather(*(hop.close() for hop in self._hops))

    async def _complete(self) -> Packed:
        """Bring the current step to its end."""
        while True:
            self._event.clear()
            action = next_action(self._hops, list(self._steps), time.perf_counter())
            match action:
                case Done():
                    assert self._outputs is not None
                    self._committed = self._number - 1
                    self._forget_answered()
                    return self._outputs
                case Deliver(index, number):
                    hop = self._hops[index]
                    if number in (hop.pushed, hop.rejected) and index:
                        await self._stop_pushing(index)
                    await hop.deliver(hop.record.get(number))
                case Mend(index, overdue):
                    if overdue:
                        hop = self._hops[index]
                        hop.error = PeerSilent(f"{whose(hop.hop)} has not answered in time")
                    await self._mend(index)
                case Wait(until):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(until - time.perf_counter() if until < math.inf else None):
                            await self._event.wait()

    async def _mend(self, index: int) -> None:
        hop = self._hops[index]
        hop.error = hop.error or (None if hop.stale else hop.leaving)
        if hop.error is not None and not is_hop_lost(hop.error):
            error, hop.error = hop.error, None
            raise error
        done = min(hop.replied, hop.received, self._committed)
        upcoming = next((number for number in self._steps if number > done), self._number)
        mended = await self._failover.mend(self._hops, index, Past(hop.record, done, upcoming))
        self._hops[index : index + 1] = mended
        for number, layout in self._steps.items():
            for one in mended:
                if one.replied < number:
                    one.expect(number, Outputs(layout.tokens, self._hidden_size))
        # Only now, because from now on steps may be pushed to them.
        await self._failover.link(self._hops, range(max(0, index - 1), min(len(self._hops), index + len(mended) + 1)))

    async def _stop_pushing(self, index: int) -> None:
        """What was pushed to a hop did not arrive there, or was refused, and this client has to deliver it itself.

        Which of the two servers is at fault cannot be known, so neither is blamed; but it happens once, not each step.
        """
        pusher = self._hops[index - 1]
        logger.debug("%s pushes no more: that failed", whose(pusher.hop))
        await pusher.link(self._hops[index - 2] if index > 1 else None, None)

    def _heard(self, hop: HopSession, number: int, outputs: Packed) -> None:
        """A hop has answered: its outputs are what goes into the next one."""
        layout = self._steps.get(number)
        if layout is None or hop not in self._hops:
            return
        index = self._hops.index(hop)
        if hop is self._hops[-1]:
            self._outputs = outputs
            return
        following = self._hops[index + 1]
        following.record.add(Step(number, layout, outputs))
        if following.replied < number and following.rejected < number and hop.passed_on:
            following.pushed = max(following.pushed, number)
            following.handed(outputs.tokens)

    def _changed(self) -> None:
        self._event.set()

    def _forget_answered(self) -> None:
        """Steps that all hops have answered are of no interest any more, but as a part of the record."""
        done = min(hop.replied for hop in self._hops)
        for number in [number for number in self._steps if number <= done]:
            del self._steps[number]
        for hop in self._hops:
            hop.record.tidy(done)

    def _give_up(self, number: int) -> None:
        """The step did not come to its end: what some servers have computed of it must never be built upon.

        A later step that goes on before it sets them back by itself. Rows that it has copied about cannot be set back.
        """
        layout = self._steps.pop(number)
        for hop in self._hops:
            hop.give_up(number)
            hop.stale = hop.stale or layout.sources is not None
