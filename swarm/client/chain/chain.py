"""An open session over all hops of a route. Runs in the network loop; handles bytes, not tensors.

The first server is handed each step; the others get it from the server before. Every server also answers this client,
so that the history of each hop is complete (a failover depends on it). `next_action` decides what to
do next; here it is done.

Several steps may be under way at once if each only continues the one before: the chunks of a prompt, or tokens that are
sent before the last server has answered. A server that has missed one refuses the next, because that would begin beyond
the end of its cache, or continue a step that the server has not seen. So nothing is ever computed on top of a wrong
past, whatever is lost, late or given up.

docs/architecture.md follows one failure through these files: "From a server's hang to the next token".

`steps` is for those who wait for outputs. `begin`, `wait`, `outputs`, `settle` and `give_up_under_way` are for those
who look at outputs on their way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from swarm.client.chain.linked_hops import LinkedHops
from swarm.client.chain.next_action import Deliver, Finished, Repair, WaitUntil, next_action
from swarm.client.chain.prefix import ChainState, Prefix
from swarm.client.chain.prompt_chunks import max_chunks_in_flight
from swarm.client.chain.steps_under_way import StepsUnderWay
from swarm.client.hops.blame import checked_up_to
from swarm.client.hops.hop_progress import NO_STEP
from swarm.client.hops.hop_session import HopSession, SessionContext
from swarm.client.hops.input_history import Step
from swarm.client.routes.events import PromptComputed, SessionEvent
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.common.weak_callback import weak_callback
from swarm.data_structures import HopTiming, Route, StepLayout
from swarm.errors import PeerTimeout, ProtocolViolation, SessionClosed, SwarmError
from swarm.protocol.messages import ExitTerms, Receipt

MAX_STEPS_UNDER_WAY = 32
"""Steps of a few tokens that a server may have been handed and not answered."""


STATE_TIMEOUT_S = 2.0
"""How long a session that is to be kept may wait for the last answers of its servers."""


class Chain:
    """One session's servers.

    Args:
        context: what stays the same, whatever happens to them.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._under_way = StepsUnderWay()
        # Weak, so that a session's history is freed when nobody has the chain any more.
        on_reply, on_change = weak_callback(self._on_reply, None), weak_callback(self._on_change, None)
        self._hops = LinkedHops(context, self._under_way, on_reply, on_change)
        self._everywhere = False
        """Whether the answers of all hops are waited for, not just those of the last one."""
        self._reports_chunks = False
        """Whether answers are reported that the caller does not see one by one."""
        self._outputs: dict[int, PackedHidden] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether servers keep the session."""
        return bool(self._hops.hops) and not self._closed

    @property
    def next_number(self) -> int:
        """Number of the step that will begin next."""
        return self._under_way.next_number

    @property
    def route(self) -> Route:
        """The servers in use now."""
        return self._hops.route

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Of the last step (all its chunks together), one a hop; empty before the first.

        A server answers this client after it has pushed to the next server; a timing that has not come yet is that of
        the step before.
        """
        return tuple(timing for hop in self._hops.hops if (timing := hop.progress.clock.timing) is not None)

    async def open(self, prefix: Prefix | None = None, room_timeout: float | None = None) -> int:
        """Reserve cache space on the servers of a route; with how many tokens of a prefix of one sequence it begins.

        Raises `MissingBlocks` or a `RemoteError`.

        Args:
            room_timeout: see `HopOpener.waiting_for_room`.
        """
        return await self._hops.open(prefix, room_timeout)

    def appends(self, layout: StepLayout) -> bool:
        """Whether a step does nothing but continue what all sequences have."""
        return self._under_way.appends(layout)

    async def step(self, hidden: PackedHidden, layout: StepLayout) -> PackedHidden:
        """One step through all blocks, whatever happens to the servers meanwhile. Raises as `steps` does."""
        return (await self.steps([(hidden, layout)]))[0]

    async def steps(self, parts: Sequence[tuple[PackedHidden, StepLayout]]) -> list[PackedHidden]:
        """Steps through all blocks, one behind the other, whatever happens to the servers meanwhile; their outputs.

        Either all of them come to their end, or all are given up.

        Args:
            parts: what goes in. Several only if the first copies no rows, and each other one continues the one before.

        Raises:
            MissingBlocks: no server held some blocks for too long; `resume` or another step tries again.
            NotFinite, TooLong: a step itself is wrong. The session goes on with another one.
            SessionClosed: the session was closed before.
        """
        await self._require_sound(parts, together=len(parts) > 1)
        if len(parts) > 1:
            self._hops.window = 1
            await self._advance(everywhere=True)
        await self._hops.link_again()
        await self._hops.allow_rows(parts[0][1].sequences)
        window = max_chunks_in_flight(parts[0][0].tokens) if len(parts) > 1 else 1
        numbers = self._take_in(parts, window)
        self._reports_chunks = len(parts) > 1
        try:
            await self._advance()
        except BaseException:
            self.give_up_after(numbers.start - 1)
            raise
        finally:
            self._reports_chunks = False
        outputs = [self._outputs[number] for number in numbers]
        self.settle(numbers[-1])
        return outputs

    def inputs(self) -> list[tuple[PackedHidden, StepLayout]]:
        """Steps that bring another chain to where this one is, while none is under way."""
        return [(hidden, layout) for layout, hidden in self._hops.hops[0].history.replay(self.next_number - 1)]

    async def begin(
        self, hidden: PackedHidden, layout: StepLayout, exits: ExitTerms | None = None, exit_block: int | None = None
    ) -> int:
        """Send a step off behind those that are under way; its number.

        Args:
            layout: copies no rows.
            exits: when its tokens, at most one a sequence, may leave inside a span.
            exit_block: the first in front of which this client may let them leave.

        Raises as `steps` does. Then those that are not settled have to be given up.
        """
        parts = [(hidden, layout)]
        await self._require_sound(parts, together=True)
        if self._hops.are_unlinked or (self._hops.are_catching_up and not self.appends(layout)):
            await self._advance(everywhere=True)
            await self._hops.link_again()
        await self._hops.allow_rows(layout.sequences)
        (number,) = self._take_in(parts, MAX_STEPS_UNDER_WAY, exits, exit_block)
        try:
            await self._advance(lambda: self._hops.hops[0].progress.is_handed(number), patient=False)
        except BaseException:
            self.give_up_after(number - 1)
            raise
        return number

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Keep the steps that are under way going until `ready`, or until all servers have answered all of them.

        Raises as `steps` does. Then those that are not settled have to be given up.
        """
        await self._advance(ready, everywhere=True)

    def outputs(self, number: int, block: int) -> PackedHidden | None:
        """What a step under way is in front of `block` (or behind the last one), if that has come to this client."""
        if block == self._context.span.end:
            return self._outputs.get(number)
        for hop in self._hops.hops:
            if hop.hop.span.start == block:
                step = hop.history.find(number)
                return step.hidden if step is not None else None
        return None

    def settle(self, number: int) -> None:
        """The steps up to `number` are answered, and stand: they will not be given up any more."""
        self._hops.refillable = max(self._hops.refillable, number)
        self._hops.on_settled()
        for done in [done for done in self._outputs if done <= number]:
            del self._outputs[done]
        self._forget_answered(number)

    async def give_up_under_way(self, after: int) -> None:
        """Give up all steps behind number `after`, and tell the servers, which have not computed all of them yet."""
        end = self.next_number
        self.give_up_after(after)
        if end > after + 1:
            await asyncio.gather(*(hop.announce_given_up(after + 1, end) for hop in self._hops.hops[1:]))

    def report(self, event: SessionEvent) -> None:
        """Tell the listeners of the session."""
        self._context.emit(event)

    async def resume(self) -> None:
        """Replace the servers that were lost now, instead of at the next step. Raises `MissingBlocks`."""
        for hop in list(self._hops.hops):
            if hop in self._hops.hops and (hop.progress.error is not None or hop.progress.leaving is not None):
                await self._hops.repair(self._hops.hops.index(hop))

    async def receipts(self) -> list[Receipt]:
        """What the servers have computed so far, signed by them, in the order of the route.

        Waits for the answers that have yet to come. Raises as `steps` does, or as `HopSession.receipt`; a server whose
        receipt is wrong is left.
        """
        await self._advance(everywhere=True)
        found: list[Receipt] = []
        for hop in self._hops.hops:
            try:
                receipt = await hop.receipt()
            except ProtocolViolation as error:
                hop.progress.on_failed(error)
                raise
            found += [receipt] if receipt is not None else []
        return found

    async def state(self) -> ChainState | None:
        """What it has computed, when all servers have answered; None if that cannot be said soon, as one has failed."""
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                await self._advance(everywhere=True)
        except (TimeoutError, SwarmError):
            return None
        if not all(hop.is_sound and not hop.progress.stale for hop in self._hops.hops):
            return None
        outputs = self._hops.outputs.copy() if self._context.samples is not None else None
        return ChainState(tuple((hop.hop, hop.session_id, hop.history.copy()) for hop in self._hops.hops), outputs)

    async def close(self, keep: int = 0) -> None:
        """Free the session on all servers, except for `keep` positions that they may keep."""
        self._closed = True
        await self._hops.close(keep)

    async def _require_sound(self, parts: Sequence[tuple[PackedHidden, StepLayout]], *, together: bool) -> None:
        if self._closed:
            raise SessionClosed("this session is closed; open another one")
        for hidden, _ in parts:
            await hidden.require_finite()
        if together and parts[0][1].sources is not None:
            raise ValueError("a step that copies rows cannot be under way together with others")

    def _take_in(
        self,
        parts: Sequence[tuple[PackedHidden, StepLayout]],
        window: int,
        exits: ExitTerms | None = None,
        exit_block: int | None = None,
    ) -> range:
        """Take steps in, to be delivered by `_advance`; their numbers."""
        appended = self.appends(parts[0][1])
        steps = self._under_way.add(parts, exits, exit_block)
        if appended:
            # Whatever becomes of them: a later step sets back by itself what it does not continue.
            self._hops.refillable = steps[-1].number
        self._hops.window = window
        hops = self._hops.hops
        for hop in hops:
            hop.progress.on_call_begun(steps[0].number)
        for step in steps:
            outputs = step.outputs
            for hop in hops:
                hop.expect(step.number, outputs)
            hops[0].add_input(step)
        return range(steps[0].number, self.next_number)

    async def _advance(
        self,
        ready: Callable[[], bool] = lambda: False,
        *,
        everywhere: bool = False,
        patient: bool = True,
    ) -> None:
        """Bring the steps that are under way to their end: at the last hop, or everywhere.

        Args:
            ready: end earlier, as soon as this is true.
            patient: whether to wait where there is nothing to do for now; else that is the end.
        """
        self._everywhere = everywhere
        while not ready():
            self._changed.clear()
            if self._hops.standbys.current is not None:
                await self._hops.replace_late()
            progress = [hop.progress for hop in self._hops.hops]
            action = next_action(
                progress,
                list(self._under_way.steps),
                time.perf_counter(),
                self._hops.window,
                everywhere=everywhere,
            )
            match action:
                case Finished():
                    return
                case Deliver(index, number):
                    await self._hops.deliver(index, number, self._changed)
                case Repair(index, overdue):
                    hop = self._hops.hops[index]
                    if overdue:
                        hop.progress.on_failed(PeerTimeout(f"{describe_hop(hop.hop)} has not answered in time"))
                    await self._hops.repair(index)
                case WaitUntil(until):
                    if not patient:
                        return
                    await self._hops.wait(self._changed, until)

    def _on_reply(self, hop: HopSession, number: int, outputs: PackedHidden) -> None:
        """A hop has answered: its outputs are what goes into the next one."""
        step = self._under_way.steps.get(number)
        hops = self._hops.hops
        if step is None or hop not in hops:
            self._on_change()
            return
        behind = hops.index(hop) + 1
        following = hops[behind] if behind < len(hops) else None
        onward = step.onward(outputs)
        hop.add_outputs(onward)
        if following is None:
            self._outputs[number] = outputs
            if self._context.samples is not None:
                self._hops.outputs.add(onward)
            if self._reports_chunks:
                self._context.emit(PromptComputed(max(step.layout.lengths)))
        else:
            self._pass_on(hop, following, onward)
        is_right = self._check_inputs()
        if self._everywhere or not is_right or following is None or not self._hops.may_wait_on(following, number):
            self._changed.set()

    def _pass_on(self, hop: HopSession, following: HopSession, step: Step) -> None:
        """The outputs of `hop` go into the hop behind, with `step`."""
        following.add_input(step)
        if hop.progress.last_was_pushed:
            # A server that has missed the step before refuses what is pushed to it: do not wait for that.
            before = NO_STEP
            for earlier in self._under_way.steps:
                before = earlier if earlier < step.number else before
            reliable = hop.progress.pushes_onward and following.progress.is_handed(before)
            following.progress.on_pushed(step.number, reliable, time.perf_counter())

    def _on_change(self) -> None:
        self._check_inputs()
        self._changed.set()

    def _check_inputs(self) -> bool:
        """Compare what servers have computed with what this client knows; what is wrong is computed again. Whether all
        is right.

        Outputs that the caller has taken before they were found wrong cannot be taken back.
        """
        is_right = True
        while not self._closed and (finding := self._hops.next_finding()) is not None:
            is_right = False
            if self._hops.hops[-1].misled:
                self._outputs = {number: one for number, one in self._outputs.items() if number < finding.number}
        return is_right

    def _forget_answered(self, settled: int) -> None:
        """Settled steps that all hops have answered matter only as a part of the histories."""
        done = self._hops.standbys.unneeded(settled)
        for hop in self._hops.hops:
            done = min(done, checked_up_to(hop))
        self._under_way.forget(done)
        for hop in self._hops.hops:
            hop.history.fold_if_long(done)
        self._hops.outputs.fold_if_long(done)

    def give_up_after(self, after: int) -> None:
        """All steps behind number `after` are given up: what servers have computed of them must not be built upon.

        The next step gets a new number and sets its sequences back to where they go on. What these steps copied about
        cannot be set back, so then every cache is filled again.
        """
        self._hops.standbys.drop()
        given_up = self._under_way.give_up_after(after)
        self._outputs = {number: outputs for number, outputs in self._outputs.items() if number <= after}
        copied_rows = any(step.layout.sources is not None for step in given_up)
        for hop in self._hops.hops:
            hop.give_up(after, copied_rows)
        self._hops.outputs.drop_after(after)
