"""Putting another server in the place of one that was lost, in the middle of a session (Petals, section 3.2).

The blocks of the lost server are routed again, perhaps cut differently; the history of what went into them is replayed
to the new servers, which then have the same caches; the servers before and behind are told their new neighbors. No
other server of the route starts again. Successive hops at one server are lost and replaced together; if only the stream
of one of them was lost, it alone goes on at the same server.

Laws:
- The step that was running is delivered again. Servers recognize a step that they have seen, so it is computed once.
- A server that failed is reported to the route source, which keeps it out of routes for a while.
- When no server holds the blocks, the session waits for one; after `RouteSource.missing_blocks_timeout` it is an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.client.chain.awaited_steps import NO_STEP
from swarm.client.chain.hop_session import HopSession
from swarm.client.chain.input_history import InputHistory
from swarm.client.chain.route_cutting import cut_route
from swarm.client.chain.session_constants import SessionContext
from swarm.client.routes.events import HopLost, Recovered, Replayed, RouteTaken
from swarm.client.routes.route_source import MIN_ROUTES_TRIED, MissingBlocksWait
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Route, Span
from swarm.errors import (
    AdapterRefused,
    CacheFull,
    MissingBlocks,
    PeerLost,
    PeerTimeout,
    RemoteError,
    TooLong,
    UnknownSession,
    WrongDtype,
)

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT_S = 0.5
"""Seconds to find out whether only the connection was lost, not the server."""


@dataclass(frozen=True)
class CacheContents:
    """What the caches of a hop have to hold.

    Attributes:
        history: the hop's inputs.
        done: number of the last step that is replayed.
        upcoming: number of the step that will be delivered next; steps between these two are void.
        epoch: of that step, unless it begins one.
    """

    history: InputHistory = field(default_factory=InputHistory)
    done: int = NO_STEP
    upcoming: int = 0
    epoch: int = 0


class Failover:
    """Opens the hops of one session, and repairs or replaces them.

    Args:
        context: the constants of the session.
        on_reply, on_change: see `HopSession`.
    """

    def __init__(
        self,
        context: SessionContext,
        on_reply: Callable[[HopSession, int, PackedHidden], None],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._routes = context.routes
        self._on_reply = on_reply
        self._on_change = on_change

    async def open(self, span: Span) -> list[HopSession]:
        """New hops over `span`, linked, for a session that has not begun."""
        hops = await self._find_hops(span, None, None, CacheContents())
        try:
            await self.link(hops, range(len(hops)))
        except BaseException:  # also when the user interrupts
            await _close_all(hops)
            raise
        self._report_route(hops)
        return hops

    async def repair(
        self,
        hops: Sequence[HopSession],
        index: int,
        contents: Callable[[range], CacheContents],
        *,
        is_doubted: bool = False,
    ) -> tuple[range, list[HopSession]]:
        """What takes the place of which hops: of `hops[index]` itself, if that is possible; or other servers, that are
        not linked yet, of all successive hops at its server.

        Args:
            contents: what the caches of such hops have to hold together.
            is_doubted: the server may be right, so it is only left, and not reported.

        Raises `MissingBlocks`, or the `RemoteError` that every server would answer with.
        """
        began = time.perf_counter()
        alone = range(index, index + 1)
        if await self._try_same_server(hops[index], contents(alone)):
            return alone, [hops[index]]
        which = next(run for run in _route(hops).runs if index in run)
        error = hops[index].progress.error
        await self._leave(hops[index], hops[which.start : which.stop], is_doubted)
        wanted = contents(which)
        if wanted.done < wanted.history.folded:
            # The first of them was filled by a replay when others had not answered all of that: one after the other.
            which, wanted = alone, contents(alone)
        lost = hops[which.start : which.stop]
        before = hops[which.start - 1].peer_id if which.start else None
        after = hops[which.stop].peer_id if which.stop < len(hops) else None
        # If no other server has cache space either, say that, and not that blocks are missing.
        reason = error if isinstance(error, CacheFull) or (is_doubted and isinstance(error, RemoteError)) else None
        avoid = frozenset({hops[index].peer_id}) if is_doubted else frozenset[str]()
        fresh = await self._find_hops(_joined_span(lost), before, after, wanted, reason, avoid)
        seconds = time.perf_counter() - began
        self._context.emit(Recovered(seconds))
        route = self._report_route([*hops[: which.start], *fresh, *hops[which.stop :]])
        logger.info("replaced in %.2f s; %s", seconds, route)
        return which, fresh

    async def begin_again(
        self, hops: Sequence[HopSession], index: int, contents: Callable[[range], CacheContents]
    ) -> tuple[range, list[HopSession]]:
        """What takes the place of which hops: of `hops[index]` and all behind it, which have computed what this client
        does not know. New sessions at the same servers, or at others if these cannot.

        Nobody but this client knows their ids, so what was pushed to the former ones does not reach them. Raises as
        `repair` does.
        """
        which = range(index, len(hops))
        wanted = contents(which)
        if wanted.done < wanted.history.folded:
            # It was filled by a replay when those behind had not answered all of that: one after the other.
            wanted = contents(which := range(index, index + 1))
        misled, before = hops[index : which.stop], hops[index - 1].peer_id if index else None
        after = hops[which.stop].peer_id if which.stop < len(hops) else None
        for hop in misled:
            hop.progress.on_replaced()
        await _close_all(misled)
        fresh, error = await self._prepare(_route(misled), wanted)
        if error is not None:
            fresh = await self._find_hops(_joined_span(misled), before, after, wanted, error)
        self._report_route([*hops[:index], *fresh, *hops[which.stop :]])
        return which, fresh

    async def link(self, hops: Sequence[HopSession], which: range, rows: int = 1, silent: int | None = None) -> None:
        """Tell the servers of `hops[which]` their neighbors, as far as these are trusted with each other.

        Args:
            rows: how many a pushed step may have.
            silent: `hops[silent]` is told not to push.
        """
        if not self._context.options.push:
            return
        for index in which:
            before = hops[index - 1] if index and self._are_trusted(hops[index - 1], hops[index]) else None
            after = hops[index + 1] if index + 1 < len(hops) and index != silent else None
            if after is not None and not self._are_trusted(hops[index], after):
                after = None
            await hops[index].link(before, after, rows)

    def _are_trusted(self, before: HopSession, after: HopSession) -> bool:
        return before.peer_id == after.peer_id or self._routes.trusts_link(before.peer_id, after.peer_id)

    async def has_others(self, hops: Sequence[HopSession], index: int) -> bool:
        """Whether other servers than that of `hops[index]` can take its place."""
        which = next(run for run in _route(hops).runs if index in run)
        before = hops[which.start - 1].peer_id if which.start else None
        after = hops[which.stop].peer_id if which.stop < len(hops) else None
        span, avoid = _joined_span(hops[which.start : which.stop]), frozenset({hops[index].peer_id})
        try:
            await self._routes.route(span, before, after, self._context.max_length, avoid)
        except MissingBlocks:
            return False
        return True

    def _report_route(self, hops: Sequence[HopSession]) -> Route:
        route = _route(hops)
        self._routes.report_route(route)
        self._context.emit(RouteTaken(route))
        return route

    async def _leave(self, failed: HopSession, lost: Sequence[HopSession], is_doubted: bool) -> None:
        """Report the server and leave it: once, or a server that has come back would be kept out again.

        Args:
            lost: all successive hops at the server of the one that failed.
            is_doubted: leave it without a report.
        """
        error = failed.progress.error
        if failed.progress.replaced or error is None:
            return
        for hop in lost:
            hop.progress.on_failed(error)
            hop.progress.on_replaced()
        logger.info("%s; looking for a replacement", error)
        reason = error.code if isinstance(error, RemoteError) else RemoteError.code
        self._context.emit(HopLost(failed.peer_id, _joined_span(lost), reason))
        if not is_doubted:
            self._routes.report_failure(failed.peer_id, error)
        await _close_all(lost)

    async def _try_same_server(self, hop: HopSession, contents: CacheContents) -> bool:
        """True if the same server can go on: only the connection was lost, or what it remembered.

        It gets this chance a few times; then it has to answer a step before it gets another.
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
            if progress.stale and (failed := await self._replay([hop], contents)) is not None:
                _, failure = failed
        except TimeoutError:
            failure = PeerTimeout(
                f"{describe_hop(hop.hop)} did not accept a new connection within {RECONNECT_TIMEOUT_S} s"
            )
        except RemoteError as refused:
            failure = refused
        if failure is not None:
            logger.debug("%s does not come back: %s", describe_hop(hop.hop), failure)
        progress.on_repair_ended((error or failure) if failure is not None else None)
        return failure is None

    async def _find_hops(
        self,
        span: Span,
        before: str | None,
        after: str | None,
        contents: CacheContents,
        last_error: RemoteError | None = None,
        avoid: frozenset[str] = frozenset(),
    ) -> list[HopSession]:
        """Open hops over `span` and fill their caches. `last_error` is why other servers were left."""
        tries = 0
        wait = MissingBlocksWait(self._routes, self._context.emit)
        while True:
            try:
                route = await self._routes.route(span, before, after, self._context.max_length, avoid)
                hops, last_error = await self._prepare(cut_route(route, self._context.boundaries), contents)
                if last_error is None:
                    return hops
                tries += 1
                if (tries >= MIN_ROUTES_TRIED and wait.is_over) or isinstance(last_error, AdapterRefused):
                    raise last_error
            except MissingBlocks as missing:
                if isinstance(last_error, TooLong | WrongDtype):
                    raise last_error from None  # waiting makes no server larger, and no number smaller
                if isinstance(last_error, CacheFull) and wait.is_over:
                    raise last_error from None
                await wait.wait(missing)

    async def _prepare(self, route: Route, contents: CacheContents) -> tuple[list[HopSession], RemoteError | None]:
        """Hops over a route, with their caches filled, and None; or why that failed, all closed again."""
        histories = [contents.history, *(InputHistory() for _ in route.hops[1:])]
        hops = [
            HopSession(self._context, hop, self._on_reply, self._on_change, history)
            for hop, history in zip(route.hops, histories, strict=True)
        ]
        try:
            error = await self._open_all(hops)
            if error is None and (failed := await self._replay(hops, contents)) is not None:
                error = self._report_failure(*failed)
        except BaseException:  # also when the user interrupts
            await _close_all(hops)
            raise
        if error is not None:
            await _close_all(hops)
            return [], error
        for peer_id in {hop.peer_id for hop in hops}:
            self._routes.report_success(peer_id)
        return hops, None

    async def _open_all(self, hops: Sequence[HopSession]) -> RemoteError | None:
        """Open all hops at once; why one of them could not be opened, or None. Each server is reported once."""
        error: RemoteError | None = None
        reported: set[str] = set()
        results = await asyncio.gather(*(hop.open() for hop in hops), return_exceptions=True)
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, RemoteError):
                if hop.peer_id not in reported:
                    error = self._report_failure(hop, result)
                reported.add(hop.peer_id)
            elif isinstance(result, BaseException):
                raise result
        return error

    async def _replay(
        self, hops: Sequence[HopSession], contents: CacheContents
    ) -> tuple[HopSession, RemoteError] | None:
        """Fill the caches of `hops`; where and why that failed, or None."""
        tokens = 0
        for layout, hidden in contents.history.replay(contents.done):
            tokens += layout.tokens
            for hop, following in zip(hops, [*hops[1:], None], strict=True):
                try:
                    outputs = await hop.replay(layout, hidden, contents.upcoming, following is not None, contents.epoch)
                except RemoteError as error:
                    return hop, error
                if following is not None and outputs is not None:
                    following.history.add_replayed(layout, outputs, contents.done)
                    hidden = outputs
        for hop in hops:
            hop.progress.on_refilled(contents.done)
            if tokens:
                self._context.emit(Replayed(hop.hop.span, tokens))
        return None

    def _report_failure(self, hop: HopSession, error: RemoteError) -> RemoteError:
        """Report the server, but not for what is the client's own matter: what does not fit here fits nowhere."""
        if not isinstance(error, AdapterRefused):
            self._routes.report_failure(hop.peer_id, error)
        return error


def _route(hops: Sequence[HopSession]) -> Route:
    return Route(tuple(hop.hop for hop in hops))


def _joined_span(hops: Sequence[HopSession]) -> Span:
    """The blocks of successive hops."""
    return Span(hops[0].hop.span.start, hops[-1].hop.span.end)


async def _close_all(hops: Sequence[HopSession]) -> None:
    await asyncio.gather(*(hop.close() for hop in hops))
