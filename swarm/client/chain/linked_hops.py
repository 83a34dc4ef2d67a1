"""The hops of one session, in the order of its route: how they are linked, repaired and replaced.

Another server takes the place of one that was lost, in the middle of a session (Petals, section 3.2). The blocks of the
lost server are routed again, perhaps cut differently; the history of what went into them is replayed to the new
servers, which then have the same caches; the servers before and behind are told their new neighbors. No other server of
the route starts again.

Laws:
- The step that was running is delivered again. Servers recognize a step that they have seen, so it is computed once.
- A server that failed is reported to the route source, which keeps it out of routes for a while.
- When no server holds the blocks, the session waits for one; after `RouteSource.missing_blocks_timeout` it is an error.
- A server that is only late is replaced before it is given up, and not blamed (`late`); one whose answer is wrong
  begins again, or is replaced (`swarm.client.hops.blame`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from swarm.client.chain.hop_opening import CacheContents, HopOpener, close_all, joined_span, neighbors_of, route_of
from swarm.client.chain.late import Alarm, Standby, Standbys, none_late_before
from swarm.client.chain.next_action import is_handed_on
from swarm.client.chain.prefix import Prefix
from swarm.client.chain.steps_under_way import StepsUnderWay
from swarm.client.hops.blame import Finding, Verdict, checked_up_to, first_finding
from swarm.client.hops.hop_progress import NO_STEP
from swarm.client.hops.hop_session import HopSession, SessionContext
from swarm.client.hops.input_history import InputHistory, first_tokens
from swarm.client.hops.work_sample import offer_sample
from swarm.client.routes.events import HopLost, Recovered, RouteTaken
from swarm.client.routes.route_source import is_worth_another_server, not_finite
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.common.kept_errors import without_frames
from swarm.common.weak_callback import weak_callback
from swarm.data_structures import Route
from swarm.errors import (
    CacheFull,
    MissingBlocks,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    RemoteError,
    SuspectOutputs,
    UnknownSession,
)
from swarm.transport.stream import MAX_COALESCED_BYTES

logger = logging.getLogger(__name__)

CLIENT_STALL_S = 0.05
"""If a timer fires so much too late, it is this client that stood still, and not the servers."""

RECONNECT_TIMEOUT_S = 0.5
"""Seconds to find out whether only the connection was lost, not the server."""


class LinkedHops:
    """The hops of one session. Each server pushes to the next, unless that failed.

    Args:
        context: the constants of the session.
        under_way: steps that hops may still have to answer.
        on_reply, on_change: see `HopSession`.

    Attributes:
        hops: in the order of the route.
        outputs: of the last hop; kept only if samples are taken.
        route: the servers in use now.
        standbys: other servers that are asked beside one that is late.
        are_unlinked: whether some server does not push until the steps that are under way have come to their end.
        window: steps that a server may have been handed without having answered; see `next_action`.
        refillable: caches are filled again up to this step at most: a later one may still be given up, and then has to
            be taken out. It never goes back, because what a replay has filled a cache with cannot be taken apart.
    """

    def __init__(
        self,
        context: SessionContext,
        under_way: StepsUnderWay,
        on_reply: Callable[[HopSession, int, PackedHidden], None],
        on_change: Callable[[], None],
    ) -> None:
        self.hops: list[HopSession] = []
        self.outputs = InputHistory()
        self.route = Route()
        self.are_unlinked = False
        self.window = 1
        self.refillable = NO_STEP
        self._context = context
        self._routes = context.routes
        self._under_way = under_way
        self._opener = HopOpener(context, on_reply, on_change)
        contents, stop_pushes = weak_callback(self._contents), weak_callback(self.stop_pushes_to)
        self.standbys = Standbys(context, self._opener, contents, on_change, stop_pushes)
        self._rows = 1
        self._alarm = Alarm()  # ends `wait`
        self._refuser: tuple[str, Exception] | None = None
        """A server that refused a step as one that every server would refuse, and why. Another one is asked now."""
        self._nonsense: tuple[int, str] | None = None
        """A step from which a server made NaN, and that server. Another one is asked now."""
        self._not_finite: NotFiniteOutputs | None = None
        """The last server that produced NaN or infinity: the error to raise if no other server does better."""

    @property
    def are_catching_up(self) -> bool:
        """Whether a hop that took a lost one's place lacks a step that had begun before."""
        return any(hop.progress.replied < hop.progress.catch_up_to for hop in self.hops)

    def may_wait_on(self, following: HopSession, number: int) -> bool:
        """Whether `wait` may go on, if only the last hop is waited for, although the hop before `following` has just
        answered a step. Then it lasts until the next answer is late."""
        if not is_handed_on(following.progress, number, self._under_way.next_number - 1):
            return False
        late = none_late_before([hop.progress for hop in self.hops])
        if self.standbys.current is not None or late <= time.perf_counter():
            return False
        self._alarm.move(late)
        return True

    # Opening and linking

    async def open(self, prefix: Prefix | None = None, room_timeout: float | None = None) -> int:
        """Reserve cache space on servers: those that computed the prefix if they still have it, else of a new route.

        Returns with how many tokens of the prefix it begins. Raises `MissingBlocks` or a `RemoteError`.

        Args:
            room_timeout: see `HopOpener.waiting_for_room`.
        """
        with self._opener.waiting_for_room(room_timeout):
            begun = await self._open(prefix)
        self._report_route()
        return begun

    async def _open(self, prefix: Prefix | None) -> int:
        hops, begun = await self._opener.resume(prefix.source.hops, len(prefix)) if prefix is not None else ([], 0)
        if not hops:
            hops = await self._opener.find(self._context.span, None, None, CacheContents())
        self._use(hops)
        try:
            if prefix is not None and begun:
                self._under_way.begin_at(begun)
                if prefix.source.outputs is not None:
                    self.outputs = InputHistory((first_tokens(prefix.source.outputs, begun),))
                for hop in hops:
                    if hop.progress.stale or hop.progress.error is not None:
                        await self.repair(self.hops.index(hop))
            await self._link(range(len(self.hops)))
        except BaseException:  # also when the user interrupts
            hops = self.hops
            self._use([])
            await close_all(hops)
            raise
        return begun

    async def close(self, keep: int = 0) -> None:
        """Free the session on all servers, except for `keep` positions that they may keep."""
        for index, hop in enumerate(self.hops):
            if hop.is_sound:
                self._offer_sample(index)
        await asyncio.gather(close_all(self.hops, keep), self.standbys.close())

    async def link_again(self) -> None:
        """Let all servers push. Only while no step is under way."""
        if self.are_unlinked:
            self.are_unlinked = False
            await self._link(range(len(self.hops)))

    async def allow_rows(self, rows: int) -> None:
        """Let all servers push steps of so many rows. A server takes no more from another one than its client says."""
        if rows > self._rows:
            self._rows = rows
            await asyncio.gather(*(hop.allow_rows(rows) for hop in self.hops))

    @property
    def _is_pipelined(self) -> bool:
        """Whether a server may have several steps under way."""
        return self.window > 1

    async def stop_pushes_to(self, index: int, for_now: bool = True) -> None:
        """What was pushed to a hop did not arrive there, or was refused, so this client has to deliver it itself.

        Which of the two servers is at fault cannot be known, so neither is blamed. `for_now`: it may just have
        missed one of several steps, so they try again when no step is under way.
        """
        self.are_unlinked = self.are_unlinked or for_now
        self.hops[index].progress.on_pushes_stopped()
        logger.debug("%s no longer pushes: a push failed", describe_hop(self.hops[index - 1].hop))
        await self._link(range(index - 1, index), silent=index - 1)

    async def _link(self, which: range, silent: int | None = None) -> None:
        """Tell some servers their neighbors, as far as they should push to each other.

        Args:
            silent: the index of one that is told not to push.
        """
        if not self._context.options.push:
            return
        for index in which:
            hop = self.hops[index]
            before = self.hops[index - 1] if index else None
            after = self.hops[index + 1] if index + 1 < len(self.hops) and index != silent else None
            if before is not None and not self._may_push(before, hop):
                before = None
            if after is not None and not self._may_push(hop, after):
                after = None
            await hop.link(before, after, self._rows)

    def _may_push(self, before: HopSession, after: HopSession) -> bool:
        # No server connects to itself.
        return before.peer_id != after.peer_id and self._routes.may_push(before.peer_id, after.peer_id)

    def _use(self, hops: list[HopSession]) -> None:
        """From now on the chain consists of these."""
        self.hops = hops
        self.route = route_of(hops)

    def _report_route(self) -> None:
        self._routes.report_route(self.route)
        self._context.emit(RouteTaken(self.route))

    # Steps

    async def deliver(self, index: int, number: int, changed: asyncio.Event) -> None:
        """Hand a step over. If the server does not read it, others are asked meanwhile; see `repair` and `wait`."""
        hop = self.hops[index]
        if index and (number <= hop.progress.pushed or hop.progress.push_refused):
            await self.stop_pushes_to(index, for_now=self._is_pipelined)
        step = hop.history.get(number)
        if len(step.hidden.payload) <= MAX_COALESCED_BYTES:
            await hop.deliver(step)
            return
        delivery = hop.begin_delivery(step)
        delivery.add_done_callback(lambda _: changed.set())
        while not delivery.done() and not self.standbys.is_ready:
            await self.wait(changed, math.inf)
            changed.clear()

    async def wait(self, changed: asyncio.Event, until: float) -> None:
        """Wait until `changed` is set, or until then. Where an answer is late, others are asked. How long the answers
        before took is noted here, where there is time for it."""
        self.standbys.ask_if_slow(self.hops)
        late = await self.standbys.ask_if_late(self.hops)
        if late is None:
            return
        self._alarm.start(min(until, late), changed.set)
        try:
            await changed.wait()
        finally:
            self._alarm.stop()
        stood_still = time.perf_counter() - self._alarm.time
        if stood_still > CLIENT_STALL_S:
            for hop in self.hops:
                hop.progress.clock.excuse(stood_still)
            await asyncio.sleep(CLIENT_STALL_S)  # what has come meanwhile is read first

    def on_settled(self) -> None:
        """The steps so far are answered. If one was refused before, then by a server that alone thinks so."""
        self.standbys.allowance.on_answered()
        self._not_finite = None
        if self._refuser is not None:
            self._routes.report_failure(*self._refuser)
            self._refuser = None

    def next_finding(self) -> Finding | None:
        """Compare what servers say that they have computed with what this client knows, and draw the consequences."""
        finding = first_finding(self.hops)
        if finding is None:
            return None
        self.standbys.drop()
        hop, behind, number = self.hops[finding.index], self.hops[finding.index + 1 :], finding.number
        before = self.hops[finding.index - 1] if finding.index else hop
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
                self._routes.distrust_link(before.peer_id, hop.peer_id)
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
        if self.hops[-1].misled:
            self.outputs.forget_from(number)
        return finding

    def _offer_sample(self, index: int) -> None:
        done = self._contents(range(index, index + 1)).done
        offer_sample(self._context, self.hops, index, self.outputs, done)

    # Failover

    async def repair(self, index: int) -> None:
        """Repair a hop, or put other servers in the place of its server. Raises its error if none would do better, or
        `MissingBlocks`."""
        began = time.perf_counter()
        hop = self.hops[index]
        hop.progress.on_departure_due()
        if await self._replace_by_standby(hop):
            return
        if await self._is_irreplaceable_suspect(index):
            hop.progress.take_error()  # so it begins again, and another server gets its outputs
        is_doubted = await self._is_doubted(index)
        error = None if hop.progress.replaced or is_doubted else hop.progress.error
        if error is not None and not is_worth_another_server(error):
            raise hop.progress.take_error()
        which = range(index, index + 1)
        if hop.misled and not isinstance(hop.progress.error, ProtocolViolation | SuspectOutputs):
            which, hops = await self._begin_again(index)
            self._put(which, hops)
            self._report_route()
        elif await self._try_same_server(hop, self._contents(which)):
            hops = [hop]
            self._put(which, hops)
        else:
            hops = await self._replacement(index, is_doubted)
            self._put(which, hops)
            self._report_recovered(began)
        await self._link_new(index, len(hops))

    async def replace_late(self) -> None:
        """Put the servers that were asked in the place of a late one, if they were first."""
        standby = self.standbys.take_if_ready(self.hops)
        if standby is not None:
            await self._install(standby)

    async def _replace_by_standby(self, hop: HopSession) -> bool:
        """Whether servers that were asked before a late one failed have taken its place."""
        standby = self.standbys.current
        if standby is None or standby.replaced is not hop:
            return False
        if hop.progress.error is None or not is_worth_another_server(hop.progress.error):
            self.standbys.drop()
            return False
        await self._report_and_leave(hop)
        await asyncio.wait({standby.filling})
        if self.standbys.current is not standby or self.standbys.take_if_ready(self.hops) is None:
            return False
        await self._install(standby)
        return True

    async def _install(self, standby: Standby) -> None:
        left, hops = standby.replaced, standby.hops
        index = self.hops.index(left)
        self._put(range(index, index + 1), hops)
        if not left.progress.replaced:
            self._context.emit(HopLost(left.peer_id, left.hop.span, "slow" if standby.number is None else "late"))
            self.standbys.retire(left, was_slow=standby.number is None)
        self._report_recovered(standby.began)
        await self._link_new(index, len(hops))

    def _put(self, which: range, repaired: Sequence[HopSession]) -> None:
        """Put hops in the place of others, or repaired ones in their own place."""
        first, last = which.start, which.start + len(repaired)
        self._use([*self.hops[:first], *repaired, *self.hops[which.stop :]])
        last_begun = self._under_way.next_number - 1
        if last < len(self.hops):
            self.hops[last].claims.on_pusher_replaced(last_begun)
        for hop in repaired:
            hop.progress.on_joined(last_begun, hop.history.last)
            for number, step in self._under_way.steps.items():
                if hop.progress.replied < number:
                    hop.expect(number, step.outputs)

    async def _link_new(self, first: int, count: int) -> None:
        """Link `count` hops that have taken their places from index `first` on. Not before, because from then on steps
        may be pushed to them."""
        neighbors = range(max(0, first - 1), min(len(self.hops), first + count + 1))
        silent = None
        if first and (self._is_pipelined or len(self.hops[first].progress.expected) > 1):
            # It has to catch up first: it would refuse what the server before pushes meanwhile.
            self.are_unlinked, silent = True, first - 1
        await self._link(neighbors, silent)

    def _report_recovered(self, began: float) -> None:
        """Others have taken the place of a server that was left at `began`."""
        seconds = time.perf_counter() - began
        self._context.emit(Recovered(seconds))
        self._report_route()
        logger.info("replaced in %.2f s; %s", seconds, self.route)

    async def _replacement(self, index: int, is_doubted: bool) -> list[HopSession]:
        """Hops at other servers, not linked yet, for the place of `hops[index]`, which is left.

        Args:
            is_doubted: the server may be right, so the client leaves it without reporting it.

        Raises `MissingBlocks`, or the `RemoteError` that every server would answer with.
        """
        hop, which = self.hops[index], range(index, index + 1)
        error = hop.progress.error
        await self._report_and_leave(hop, is_doubted)
        reason: RemoteError | None = None
        if isinstance(error, ProtocolViolation | SuspectOutputs):
            reason = self._not_finite
        elif isinstance(error, CacheFull) or (is_doubted and isinstance(error, RemoteError)):
            reason = error  # if no other server has cache space either, say that, and not that blocks are missing
        avoid = frozenset({hop.peer_id}) if is_doubted else frozenset[str]()
        contents = self._contents(which)
        return await self._opener.find(hop.hop.span, *neighbors_of(self.hops, which), contents, reason, avoid)

    async def _begin_again(self, index: int) -> tuple[range, list[HopSession]]:
        """New sessions for `hops[index]` and all behind it, which have computed something unknown to this client: at
        the same servers, or at others if these cannot. Returns which hops they replace, and the new ones.

        Only this client knows the ids of the new sessions, so what was pushed to the former ones does not reach them.
        """
        which = range(index, len(self.hops))
        contents = self._contents(which)
        if contents.done < contents.history.folded:
            # It was filled by a replay when those behind had not answered all of that: one after the other.
            contents = self._contents(which := range(index, index + 1))
        misled = self.hops[index : which.stop]
        before, after = neighbors_of(self.hops, which)
        for hop in misled:
            hop.progress.on_replaced()
        await close_all(misled)
        fresh, error = await self._opener.prepare(route_of(misled), contents)
        if error is not None:
            fresh = await self._opener.find(joined_span(misled), before, after, contents, error)
        return which, fresh

    async def _try_same_server(self, hop: HopSession, contents: CacheContents) -> bool:
        """Whether the same server can go on, because only the connection or its memory of the session was lost.

        It gets this chance a few times; then it has to answer a step before it gets another. After a timeout it gets
        none (`HopProgress.may_be_repaired`).
        """
        progress = hop.progress
        if not progress.may_be_repaired:
            return False
        error = progress.error
        failure: RemoteError | None = None
        try:
            if isinstance(error, PeerLost | UnknownSession):
                async with asyncio.timeout(RECONNECT_TIMEOUT_S):
                    progress.on_reopened(await hop.open())
            elif error is not None:
                progress.on_forgotten()
            if progress.stale and (failed := await self._opener.replay([hop], contents)) is not None:
                _, failure = failed
        except TimeoutError:
            failure = PeerTimeout(f"{describe_hop(hop.hop)} did not connect again within {RECONNECT_TIMEOUT_S} s")
        except RemoteError as refused:
            failure = without_frames(refused)
        if failure is not None:
            logger.debug("%s does not come back: %s", describe_hop(hop.hop), failure)
        elif isinstance(error, PeerLost):
            logger.info("%s is connected again, after %s", describe_hop(hop.hop), error)
        progress.on_repair_ended((error or failure) if failure is not None else None)
        return failure is None

    async def _report_and_leave(self, failed: HopSession, is_doubted: bool = False) -> None:
        """Report a server that has failed, and leave it: once, or one that has come back would be kept out again.

        Args:
            is_doubted: leave it without a report.
        """
        error = failed.progress.error
        if failed.progress.replaced or error is None:
            return
        failed.progress.on_replaced()
        logger.info("%s; looking for a replacement", error)
        reason = error.code if isinstance(error, RemoteError) else RemoteError.code
        self._context.emit(HopLost(failed.peer_id, failed.hop.span, reason))
        if not is_doubted:
            self._routes.report_failure(failed.peer_id, error)
        if not failed.misled:
            self._offer_sample(self.hops.index(failed))
        await close_all([failed])

    async def _is_irreplaceable_suspect(self, index: int) -> bool:
        """Whether other servers got NaN from this one's outputs, and no server can replace it."""
        hop = self.hops[index]
        if not isinstance(hop.progress.error, SuspectOutputs) or hop.progress.replaced:
            return False
        return self._nonsense is not None and self._nonsense[1] != hop.peer_id and not await self._has_others(index)

    async def _is_doubted(self, index: int) -> bool:
        """Whether a server refuses what, it says, every server would refuse, and another one can be asked."""
        error = (hop := self.hops[index]).progress.error
        if error is None or is_worth_another_server(error) or hop.progress.replaced:
            return False
        if self._refuser is not None and self._refuser[0] != hop.peer_id:
            refuser, self._refuser = self._refuser, None
            if type(refuser[1]) is type(error):
                return False  # they agree
            self._routes.report_failure(*refuser)  # they contradict each other, so a third one is asked
        if not await self._has_others(index):
            return False
        self._refuser = hop.peer_id, error
        return True

    async def _has_others(self, index: int) -> bool:
        """Whether other servers than that of `hops[index]` can take its place."""
        hop, (before, after) = self.hops[index], neighbors_of(self.hops, range(index, index + 1))
        try:
            await self._routes.route(hop.hop.span, before, after, self._context.max_length, frozenset({hop.peer_id}))
        except MissingBlocks:
            return False
        return True

    def _contents(self, which: range) -> CacheContents:
        """What the caches of some successive hops have to hold together: not more than all of them have answered, or
        their outputs of the steps behind that would never come."""
        hops = self.hops[which.start : which.stop]
        checked = min(checked_up_to(hop) for hop in self.hops[: which.stop])
        done = min(self.refillable, hops[0].progress.received, checked, *(hop.progress.replied for hop in hops))
        upcoming, epoch = self._under_way.upcoming(done)
        return CacheContents(hops[0].history, done, upcoming, epoch, self._under_way.rows(done))
