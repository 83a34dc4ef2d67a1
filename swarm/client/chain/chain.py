"""An open session over all hops of a route. Runs in the network loop; knows bytes, not tensors.

The first server is handed each step; the others get it from the server before. Every server also answers this client,
so that the record of each hop is complete (`swarm.client.chain.failover` lives on it). What to do next is decided by
`swarm.client.chain.next_action`; here it is done.

Several steps may be under way at once if each only continues the one before, and the first of them what all servers
are known to have: the chunks of a prompt. A server that has missed one refuses the next, because that would begin
beyond the end of its cache. So nothing is ever computed on top of a wrong past, whatever is lost or late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from swarm.client.chain.failover import Failover, Past, Planner, is_hop_lost
from swarm.client.chain.hop_session import NOTHING_YET, HopSession
from swarm.client.chain.input_history import Step
from swarm.client.chain.next_action import Deliver, Done, Mend, Wait, next_action
from swarm.client.chain.prompt_chunks import window
from swarm.client.routes.events import EventListener, ignore_events
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import OutputShape, describe_hop
from swarm.client.wire.request_options import RequestOptions
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import PeerTimeout, SessionClosed
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
        adapter: what is added to the blocks.
        tell: hears of what happens to the session.
    """

    def __init__(
        self,
        network: Network,
        planner: Planner,
        manner: RequestOptions,
        span: Span,
        max_length: int,
        adapter: AdapterUpload | None = None,
        tell: EventListener = ignore_events,
    ) -> None:
        self._span = span
        self._failover = Failover(
            network, planner, manner, max_length, adapter or AdapterUpload(), self._heard, self._changed, tell
        )
        self._hops: list[HopSession] = []
        self._steps: dict[int, StepLayout] = {}
        """Steps that some hop may still have to answer."""
        self._number = 0
        self._foldable = NOTHING_YET
        """Records are folded up to this step at most: one behind may be given up, and could not be taken out again."""
        self._lengths: tuple[int, ...] | None = ()
        """Of each row after the last step; None if that was given up, so that some servers may have more."""
        self._window = 1
        self._unlinked = False
        """Some server pushes no more until the steps that are under way have come to their end."""
        self._hidden_size = 0
        self._outputs: dict[int, PackedHidden] = {}
        self._event = asyncio.Event()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether servers keep the session."""
        return bool(self._hops) and not self._closed

    @property
    def route(self) -> Route:
        """The servers in use now."""
        return Route(tuple(hop.hop for hop in self._hops))

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Of the last step (all its chunks together), one a hop; empty before the first.

        A server tells this client of a step after the next server; what has not come yet is that of the step before.
        """
        return tuple(hop.timing for hop in self._hops if hop.timing is not None)

    async def open(self) -> None:
        """Find a route and reserve room on its servers. Raises `MissingBlocks` or a `RemoteError`."""
        self._hops = await self._failover.open(self._span)

    def appends(self, layout: StepLayout) -> bool:
        """Whether a step does nothing but continue what all rows have."""
        lengths = (0,) * layout.sequences if self._lengths == () else self._lengths
        return layout.sources is None and layout.starts == lengths

    async def step(self, hidden: PackedHidden, layout: StepLayout) -> PackedHidden:
        """One step through all blocks, whatever happens to the servers meanwhile. Raises as `steps` does."""
        return (await self.steps([(hidden, layout)]))[0]

    async def steps(self, parts: Sequence[tuple[PackedHidden, StepLayout]]) -> list[PackedHidden]:
        """Steps through all blocks, one behind the other, whatever happens to the servers meanwhile; their outputs.

        Either all of them come to their end, or all are given up.

        Args:
            parts: what goes in. Several only where the first `appends`, and each other one continues the one before.

        Raises:
            MissingBlocks: nobody held some blocks for too long; `resume` or another step tries again.
            NotFinite, TooLong: a step itself is wrong. The session goes on with another one.
        """
        if self._closed:
            raise SessionClosed("this session is closed; open another one")
        for hidden, _ in parts:
            hidden.check()
        if self._unlinked:
            self._unlinked = False
            await self._failover.link(self._hops, range(len(self._hops)))
        if len(parts) > 1:
            if not self.appends(parts[0][1]):
                raise ValueError("steps that set rows back or copy them cannot be under way together with others")
            self._window = 1
            await self._advance(everywhere=True)
        numbers = range(self._number, self._number + len(parts))
        self._begin(numbers, parts)
        try:
            await self._advance()
        except BaseException:
            self._give_up(numbers)
            raise
        self._foldable, self._lengths = numbers[-1], _ends(parts[-1][1])
        self._forget_answered()
        outputs, self._outputs = self._outputs, {}
        return [outputs[number] for number in numbers]

    async def resume(self) -> None:
        """Replace the servers that were lost now, instead of at the next step. Raises `MissingBlocks`."""
        for hop in list(self._hops):
            if hop.error is not None or hop.leaving is not None:
                await self._mend(self._hops.index(hop))

    async def close(self) -> None:
        """Free the session everywhere."""
        self._closed = True
        await asyncio.gather(*(hop.close() for hop in self._hops))

    def _begin(self, numbers: range, parts: Sequence[tuple[PackedHidden, StepLayout]]) -> None:
        """Take the steps in, to be delivered by `_advance`."""
        if self.appends(parts[0][1]):
            # Whatever comes of them: a later step sets back by itself what it does not continue.
            self._foldable = numbers[-1]
        self._window = window(parts[0][0].tokens) if len(parts) > 1 else 1
        self._hidden_size, self._outputs = parts[0][0].hidden_size, {}
        for hop in self._hops:
            hop.call_start = numbers.start
        for number, (hidden, layout) in zip(numbers, parts, strict=True):
            self._steps[number] = layout
            for hop in self._hops:
                hop.expect(number, OutputShape(hidden.tokens, hidden.hidden_size))
            # A copy, because the caller may change a tensor that the payload is a view of.
            kept = PackedHidden(bytes(hidden.payload), hidden.tokens, hidden.hidden_size, hidden.wire, hidden.dtype)
            self._hops[0].record.add(Step(number, layout, kept))
        self._number = numbers.stop

    async def _advance(self, everywhere: bool = False) -> None:
        """Bring the steps that are under way to their end: at the last hop, or everywhere."""
        while True:
            self._event.clear()
            action = next_action(self._hops, list(self._steps), time.perf_counter(), self._window, everywhere)
            match action:
                case Done():
                    return
                case Deliver(index, number):
                    hop = self._hops[index]
                    if index and (number <= hop.pushed or hop.distrusts_pushes):
                        await self._stop_pushing(index)
                    await hop.deliver(hop.record.get(number))
                case Mend(index, overdue):
                    if overdue:
                        hop = self._hops[index]
                        hop.error = PeerTimeout(f"{describe_hop(hop.hop)} has not answered in time")
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
        done = min(hop.replied, hop.received, self._foldable)
        upcoming = next((number for number in self._steps if number > done), self._number)
        mended = await self._failover.mend(self._hops, index, Past(hop.record, done, upcoming))
        self._hops[index : index + 1] = mended
        for one in mended:
            one.owes = self._number - 1
            for number, layout in self._steps.items():
                if one.replied < number:
                    one.expect(number, OutputShape(layout.tokens, self._hidden_size))
        # Only now, because from now on steps may be pushed to them.
        neighbours = range(max(0, index - 1), min(len(self._hops), index + len(mended) + 1))
        if index and self._window > 1:
            # It has to catch up first: what the server before would push meanwhile, it would refuse.
            self._unlinked = True
            await self._failover.link(self._hops, neighbours, silent=index - 1)
        else:
            await self._failover.link(self._hops, neighbours)

    async def _stop_pushing(self, index: int) -> None:
        """What was pushed to a hop did not arrive there, or was refused, and this client has to deliver it itself.

        Which of the two servers is at fault cannot be known, so neither is blamed; but it happens once, not each step.
        Where several steps are under way it may just have missed one. Then they may try again afterwards.
        """
        self._unlinked = self._unlinked or self._window > 1
        pusher, self._hops[index].distrusts_pushes = self._hops[index - 1], False
        logger.debug("%s pushes no more: that failed", describe_hop(pusher.hop))
        await pusher.link(self._hops[index - 2] if index > 1 else None, None)

    def _heard(self, hop: HopSession, number: int, outputs: PackedHidden) -> None:
        """A hop has answered: its outputs are what goes into the next one."""
        layout = self._steps.get(number)
        if layout is None or hop not in self._hops:
            return
        index = self._hops.index(hop)
        if hop is self._hops[-1]:
            self._outputs[number] = outputs
            return
        following = self._hops[index + 1]
        following.record.add(Step(number, layout, outputs))
        before = max((earlier for earlier in self._steps if earlier < number), default=NOTHING_YET)
        if hop.passed_on:
            # What was pushed to a server that has missed the step before is refused there: nobody needs to wait for it.
            following.was_pushed(number, reliable=hop.may_push and following.is_handed(before))

    def _changed(self) -> None:
        self._event.set()

    def _forget_answered(self) -> None:
        """Steps that all hops have answered are of no interest any more, but as a part of the record."""
        done = min(hop.replied for hop in self._hops)
        for number in [number for number in self._steps if number <= done]:
            del self._steps[number]
        for hop in self._hops:
            hop.record.tidy(done)

    def _give_up(self, numbers: range) -> None:
        """The steps did not come to their end: what some servers have computed of them must never be built upon.

        A later step that goes on before them sets them back by itself. Rows that they copied about cannot be set back.
        """
        self._lengths = None
        for number in numbers:
            layout = self._steps.pop(number)
            for hop in self._hops:
                hop.give_up(number)
                hop.stale = hop.stale or layout.sources is not None


def _ends(layout: StepLayout) -> tuple[int, ...]:
    """How long each row is after a step."""
    return tuple(start + count for start, count in zip(layout.starts, layout.counts, strict=True))
