"""The hops of one session, in the order of its route: how they are linked, repaired and replaced."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from swarm.client.chain.alarm import Alarm
from swarm.client.chain.asking import Asking
from swarm.client.chain.blame import Finding, Verdict, checked_up_to, first_finding
from swarm.client.chain.failover import Failover
from swarm.client.chain.hop_opening import CacheContents, HopOpener, close_all, joined_span
from swarm.client.chain.next_action import goes_on_alone
from swarm.client.chain.patience import none_late_before
from swarm.client.chain.standby import Standby
from swarm.client.chain.steps_under_way import StepsUnderWay
from swarm.client.hops.hop_session import HopSession
from swarm.client.hops.session_constants import SessionContext
from swarm.client.routes.events import HopLost
from swarm.client.routes.route_source import is_worth_another_server, not_finite
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.common.weak_callback import weak_callback
from swarm.data_structures import HopTiming, Route
from swarm.errors import NotFiniteOutputs, PeerTimeout, ProtocolViolation, SuspectOutputs
from swarm.transport.stream import MAX_COALESCED_BYTES

logger = logging.getLogger(__name__)

CLIENT_STALL_S = 0.05
"""If a timer fires so much too late, it is this client that stood still, and not the servers."""


class LinkedHops:
    """The hops of one session. Each server pushes to the next, unless that failed.

    Args:
        context: the constants of the session.
        under_way: steps that hops may still have to answer.
        on_reply, on_change: see `HopSession`.

    Attributes:
        asking: other servers that are asked beside one that is late.
    """

    def __init__(
        self,
        context: SessionContext,
        under_way: StepsUnderWay,
        on_reply: Callable[[HopSession, int, PackedHidden], None],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._under_way = under_way
        self._on_reply_of_hop = on_reply
        self._on_change_of_hop = on_change
        on_reply, on_change = weak_callback(self._on_reply, None), weak_callback(self._on_change, None)
        self._opener = HopOpener(context, on_reply, on_change)
        self._failover = Failover(context, self._opener)
        contents, stop_pushes = weak_callback(self._contents), weak_callback(self.stop_pushes_to)
        self.asking = Asking(context, self._opener, contents, on_change, stop_pushes)
        self._hops: list[HopSession] = []
        self._route = Route()
        self._unlinked = False
        self._rows = 1
        self._alarm = Alarm()
        """Ends `wait`."""
        self._refuser: tuple[str, Exception] | None = None
        """A server that refused a step as one that every server would refuse, and why. Another one is asked now."""
        self._nonsense: tuple[int, str] | None = None
        """A step from which a server made NaN, and that server. Another one is asked now."""
        self._not_finite: NotFiniteOutputs | None = None
        """The last server that produced NaN or infinity: the error to raise if no other server does better."""

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[HopSession]:
        return iter(self._hops)

    def __getitem__(self, index: int) -> HopSession:
        return self._hops[index]

    @property
    def route(self) -> Route:
        """The servers in use now."""
        return self._route

    @property
    def timings(self) -> tuple[HopTiming, ...]:
        """Of the last step, one a hop; see `Chain.timings`."""
        timings = (hop.progress.clock.timing for hop in self._hops)
        return tuple(timing for timing in timings if timing is not None)

    @property
    def are_unlinked(self) -> bool:
        """Whether some server does not push until the steps that are under way have come to their end."""
        return self._unlinked

    @property
    def are_catching_up(self) -> bool:
        """Whether a hop that took a lost one's place lacks a step that had begun before."""
        return any(hop.progress.replied < hop.progress.catch_up_to for hop in self._hops)

    def behind(self, hop: HopSession) -> HopSession | None:
        """The hop that takes what this one puts out; None for the last one. Raises `ValueError` for a former hop."""
        index = self._hops.index(hop) + 1
        return self._hops[index] if index < len(self._hops) else None

    def goes_on_alone(self, following: HopSession, number: int) -> bool:
        """Whether a step that the hop before `following` has just answered goes on by itself, if only the last hop is
        waited for. Then `wait` lasts until the next answer is late."""
        if not goes_on_alone(following.progress, number, self._under_way.next_number - 1):
            return False
        late = none_late_before([hop.progress for hop in self._hops])
        if self.asking.standby is not None or late <= time.perf_counter():
            return False
        self._alarm.move(late)
        return True

    async def open(self) -> None:
        """Find a route and reserve cache space on its servers. Raises `MissingBlocks` or a `RemoteError`."""
        self._use(await self._failover.open(self._context.span))

    async def close(self) -> None:
        """Free the session on all servers."""
        await asyncio.gather(close_all(self._hops), self.asking.close())

    async def link_again(self) -> None:
        """Let all servers push. Only while no step is under way."""
        if self._unlinked:
            self._unlinked = False
            await self._failover.link(self._hops, range(len(self._hops)), self._rows)

    async def allow_rows(self, rows: int) -> None:
        """Let all servers push steps of so many rows. A server takes no more from another one than its client says."""
        if rows > self._rows:
            self._rows = rows
            await asyncio.gather(*(hop.allow_rows(rows) for hop in self._hops))

    def on_settled(self) -> None:
        """The steps so far are answered. If one was refused before, then by a server that alone thinks so."""
        self.asking.allowance.on_answered()
        self._not_finite = None
        if self._refuser is not None:
            self._context.routes.report_failure(*self._refuser)
            self._refuser = None

    def next_finding(self) -> Finding | None:
        """Compare what servers say that they have computed with what this client knows, and draw the consequences."""
        finding = first_finding(self._hops)
        if finding is None:
            return None
        self.asking.drop()
        hop, behind, number = self._hops[finding.index], self._hops[finding.index + 1 :], finding.number
        before = self._hops[finding.index - 1] if finding.index else hop
        logger.warning("step %d at %s: %s", number, describe_hop(hop.hop), finding.verdict.value)
        hop.mislead(number, keeps_inputs=True)
        suspect: HopSession | None = None
        if isinstance(finding.claim.error, NotFiniteOutputs):
            self._not_finite = not_finite(hop.hop)
        match finding.verdict:
            case Verdict.LIAR:
                why = finding.claim.error or "it computed something else than it was sent, as it says itself"
                hop.progress.on_failed(ProtocolViolation(f"{describe_hop(hop.hop)}: {why}"))
            case Verdict.LINK:
                self._context.routes.distrust_link(before.peer_id, hop.peer_id)
            case Verdict.NONSENSE:
                seen, self._nonsense = self._nonsense, (number, hop.peer_id)
                suspect = hop
                if seen is not None and seen[0] == number and seen[1] != hop.peer_id:
                    suspect = before
                    before.mislead(number, keeps_inputs=True)
                    hop.mislead(number)
        if suspect is not None:
            suspect.progress.on_failed(SuspectOutputs(f"{describe_hop(suspect.hop)}: {finding.claim.error}"))
        if finding.claim.error is None or suspect is before or finding.verdict in (Verdict.LINK, Verdict.AGAIN):
            # They have taken over what is wrong. But a server that has computed the right thing has handed that on.
            for one in behind:
                one.mislead(number)
        return finding

    def _use(self, hops: list[HopSession]) -> None:
        """From now on the chain consists of these. The route is made here: it is asked for several times a step."""
        self._hops = hops
        self._route = Route(tuple(hop.hop for hop in hops))

    async def repair(self, index: int, refillable: int, several: bool) -> None:
        """Repair a hop, or put other servers in the place of its server. Raises its error if none would do better.

        Args:
            refillable: the last step that caches are filled with; a later one may still be given up.
            several: whether several steps may be under way.
        """
        progress = self._hops[index].progress
        progress.on_departure_due()
        if await self._repair_by_standby(index, several):
            return
        if await self._is_irreplaceable_suspect(index):
            progress.take_error()  # so it begins again, and another server gets its outputs
        is_doubted = await self._is_doubted(index)
        error = None if progress.replaced or is_doubted else progress.error
        if error is not None and not is_worth_another_server(error):
            raise progress.take_error()
        which, repaired = await self._replacement(index, refillable, is_doubted)
        self._put(which, repaired)
        await self._link_new(which.start, len(repaired), several)

    def _put(self, which: range, repaired: Sequence[HopSession]) -> None:
        """Put hops in the place of others, or repaired ones in their own place."""
        first, last = which.start, which.start + len(repaired)
        self._use([*self._hops[:first], *repaired, *self._hops[which.stop :]])
        if last < len(self._hops):
            self._hops[last].claims.on_pusher_replaced(self._under_way.next_number - 1)
        for hop in repaired:
            hop.progress.on_joined(self._under_way.next_number - 1, hop.history.last)
            for number, step in self._under_way.steps.items():
                if hop.progress.replied < number:
                    hop.expect(number, step.outputs)

    async def _link_new(self, first: int, count: int, several: bool) -> None:
        """Link `count` hops that have taken their places from index `first` on. Not before, because from then on steps
        may be pushed to them."""
        neighbors = range(max(0, first - 1), min(len(self._hops), first + count + 1))
        if first and (several or len(self._hops[first].progress.steps.numbers()) > 1):
            # It has to catch up first: it would refuse what the server before pushes meanwhile.
            self._unlinked = True
            await self._failover.link(self._hops, neighbors, self._rows, silent=first - 1)
        else:
            await self._failover.link(self._hops, neighbors, self._rows)

    async def wait(self, changed: asyncio.Event, until: float, refillable: int) -> None:
        """Wait until `changed` is set, or until then. Where an answer is late, others are asked. How long the answers
        before took is noted here, where there is time for it.

        Args:
            refillable: see `repair`.
        """
        self.asking.look_around(self._hops, refillable)
        late = await self.asking.ask_if_late(self._hops, refillable)
        if late is None:
            return
        self._alarm.start(min(until, late), changed.set)
        try:
            await changed.wait()
        finally:
            self._alarm.stop()
        stood_still = time.perf_counter() - self._alarm.time
        if stood_still > CLIENT_STALL_S:
            for hop in self._hops:
                hop.progress.clock.excuse(stood_still)
            await asyncio.sleep(CLIENT_STALL_S)  # what has come meanwhile is read first

    async def deliver(self, index: int, number: int, several: bool, changed: asyncio.Event, refillable: int) -> None:
        """Hand a step over. If the server does not read it, others are asked meanwhile; see `repair` and `wait`."""
        hop = self._hops[index]
        if index and (number <= hop.progress.pushed or hop.progress.push_refused):
            await self.stop_pushes_to(index, several)
        step = hop.history.get(number)
        if len(step.hidden.payload) <= MAX_COALESCED_BYTES:
            await hop.deliver(step)
            return
        delivery = hop.begin_delivery(step)
        delivery.add_done_callback(lambda _: changed.set())
        while not delivery.done() and not self.asking.has_answered:
            await self.wait(changed, math.inf, refillable)
            changed.clear()

    async def let_standby_in(self, several: bool) -> None:
        """Put the servers that were asked in the place of a late one, if they were first; or free them, if it was.

        Args:
            several: see `repair`.
        """
        standby = self.asking.standby
        if standby is None or not (standby.is_done or standby.is_beaten):
            return
        if standby.is_wanted and all(hop in self._hops for hop in standby.late):
            self.asking.standby = None
            await self._install(standby, several)
        else:
            self.asking.drop()

    async def _install(self, standby: Standby, several: bool) -> None:
        first = self._hops.index(standby.late[0])
        which = range(first, first + len(standby.late))
        before, answered = list(self._hops), standby.late[-1].replied
        self._put(which, standby.hops)
        if not standby.late[0].progress.replaced:
            self._context.emit(HopLost(standby.late[0].peer_id, joined_span(standby.late), PeerTimeout.code))
            self.asking.see_out(standby.late)
        self._failover.report_recovered(before, which, standby.hops, standby.began)
        for number, outputs in standby.outputs.items():
            if number > answered:
                self._on_reply_of_hop(standby.hops[-1], number, outputs)
        await self._link_new(first, len(standby.hops), several)

    async def _repair_by_standby(self, index: int, several: bool) -> bool:
        """Whether servers that were asked before a late one failed have taken its place."""
        standby, progress = self.asking.standby, self._hops[index].progress
        if standby is None or self._hops[index] not in standby.late:
            return False
        error = progress.error
        if error is not None and is_worth_another_server(error) and all(hop in self._hops for hop in standby.late):
            await self._failover.leave(self._hops[index])
            await standby.wait()
        if self.asking.standby is not standby or not standby.is_wanted or error is None:
            self.asking.drop()
            return False
        self.asking.standby = None
        await self._install(standby, several)
        return True

    def _on_reply(self, hop: HopSession, number: int, outputs: PackedHidden) -> None:
        if not self.asking.on_reply(hop, outputs):
            self._on_reply_of_hop(hop, number, outputs)

    def _on_change(self) -> None:
        self.asking.on_change()
        self._on_change_of_hop()

    async def _replacement(self, index: int, refillable: int, is_doubted: bool) -> tuple[range, list[HopSession]]:
        """What takes the place of which hops, see `Failover`."""
        hop = self._hops[index]
        if hop.misled and not isinstance(hop.progress.error, ProtocolViolation | SuspectOutputs):
            return await self._failover.begin_again(self._hops, index, lambda hops: self._contents(hops, refillable))
        reason = self._not_finite if isinstance(hop.progress.error, ProtocolViolation | SuspectOutputs) else None
        return await self._failover.repair(
            self._hops,
            index,
            lambda hops: self._contents(hops, refillable),
            is_doubted=is_doubted,
            reason=reason,
        )

    async def _is_irreplaceable_suspect(self, index: int) -> bool:
        """Whether other servers got NaN from this one's outputs, and no server can replace it."""
        progress, peer_id = self._hops[index].progress, self._hops[index].peer_id
        if not isinstance(progress.error, SuspectOutputs) or progress.replaced:
            return False
        is_source = self._nonsense is not None and self._nonsense[1] != peer_id
        return is_source and not await self._failover.has_others(self._hops, index)

    async def _is_doubted(self, index: int) -> bool:
        """Whether a server refuses what, it says, every server would refuse, and another one can be asked."""
        error = (hop := self._hops[index]).progress.error
        if error is None or is_worth_another_server(error) or hop.progress.replaced:
            return False
        if self._refuser is not None and self._refuser[0] != hop.peer_id:
            refuser, self._refuser = self._refuser, None
            if type(refuser[1]) is type(error):
                return False  # they agree
            self._context.routes.report_failure(*refuser)  # they contradict each other, so a third one is asked
        if not await self._failover.has_others(self._hops, index):
            return False
        self._refuser = hop.peer_id, error
        return True

    def _contents(self, which: range, refillable: int) -> CacheContents:
        """What the caches of some successive hops have to hold together: not more than all of them have answered, or
        their outputs of the steps behind that would never come."""
        hops = self._hops[which.start : which.stop]
        checked = min(checked_up_to(hop) for hop in self._hops[: which.stop])
        done = min(refillable, hops[0].progress.received, checked, *(hop.progress.replied for hop in hops))
        return CacheContents(hops[0].history, done, *self._under_way.upcoming(done))

    async def stop_pushes_to(self, index: int, several: bool = True) -> None:
        """What was pushed to a hop did not arrive there, or was refused, so this client has to deliver it itself.

        Which of the two servers is at fault cannot be known, so neither is blamed; but it happens once, not each step.
        If several steps are under way it may just have missed one. Then they may try again afterwards.
        """
        self._unlinked = self._unlinked or several
        self._hops[index].progress.on_pushes_stopped()
        logger.debug("%s no longer pushes: a push failed", describe_hop(self._hops[index - 1].hop))
        await self._failover.link(self._hops, range(index - 1, index), self._rows, silent=index - 1)
