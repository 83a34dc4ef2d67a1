"""Putting another server in the place of one that was lost, in the middle of a session (Petals, section 3.2).

The blocks of the lost server are routed again, perhaps cut differently; the history of what went into them is replayed
to the new servers, which then have the same caches; the servers before and behind are told their new neighbors. No
other server of the route starts again.

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
from dataclasses import dataclass

from swarm.client.chain.hop_opening import CacheContents, HopOpener, close_all, joined_span, route_of
from swarm.client.hops.hop_session import HopSession
from swarm.client.hops.session_constants import SessionContext
from swarm.client.routes.events import HopLost, Recovered, RouteTaken
from swarm.client.wire.reply_checks import describe_hop
from swarm.common.kept_errors import without_frames
from swarm.data_structures import Route, Span
from swarm.errors import CacheFull, MissingBlocks, PeerLost, PeerTimeout, RemoteError, UnknownSession

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT_S = 0.5
"""Seconds to find out whether only the connection was lost, not the server."""


@dataclass(frozen=True)
class Vacancy:
    """A hop whose place others are to take.

    Attributes:
        which: the hop.
        span: its blocks.
        before, after: peer ids of the servers before and behind it; None for this client.
        contents: what the caches of those that take their place have to hold.
    """

    which: range
    span: Span
    before: str | None
    after: str | None
    contents: CacheContents


def vacancy_at(hops: Sequence[HopSession], index: int, contents: Callable[[range], CacheContents]) -> Vacancy:
    """What is vacant if the server of `hops[index]` is left.

    Args:
        contents: what the caches of such hops have to hold together.
    """
    which = range(index, index + 1)
    return Vacancy(which, hops[index].hop.span, *_neighbors(hops, which), contents(which))


def _neighbors(hops: Sequence[HopSession], which: range) -> tuple[str | None, str | None]:
    """Peer ids of the servers before and behind some hops; None for this client."""
    before = hops[which.start - 1].peer_id if which.start else None
    return before, hops[which.stop].peer_id if which.stop < len(hops) else None


class Failover:
    """Opens the hops of one session, and repairs or replaces them.

    Args:
        context: the constants of the session.
        opener: opens the hops that take others' places.
    """

    def __init__(self, context: SessionContext, opener: HopOpener) -> None:
        self._context = context
        self._routes = context.routes
        self._opener = opener

    async def open(self, span: Span) -> list[HopSession]:
        """New hops over `span`, linked, for a session that has not begun."""
        hops = await self._opener.find(span, None, None, CacheContents())
        try:
            await self.link(hops, range(len(hops)))
        except BaseException:  # also when the user interrupts
            await close_all(hops)
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
        reason: RemoteError | None = None,
    ) -> tuple[range, list[HopSession]]:
        """Repair `hops[index]` itself if possible; else open hops at other servers, not linked yet. Returns which
        hops are replaced, and by what.

        Args:
            contents: what the caches of such hops have to hold together.
            is_doubted: the server may be right, so the client leaves it without reporting it.
            reason: what to raise instead of `MissingBlocks` if no other server can be right either.

        Raises `MissingBlocks`, or the `RemoteError` that every server would answer with.
        """
        began = time.perf_counter()
        alone = range(index, index + 1)
        if await self._try_same_server(hops[index], contents(alone)):
            return alone, [hops[index]]
        error = hops[index].progress.error
        await self.leave(hops[index], is_doubted)
        vacancy = vacancy_at(hops, index, contents)
        # If no other server has cache space either, say that, and not that blocks are missing.
        if isinstance(error, CacheFull) or (is_doubted and isinstance(error, RemoteError)):
            reason = error
        avoid = frozenset({hops[index].peer_id}) if is_doubted else frozenset[str]()
        fresh = await self._opener.find(vacancy.span, vacancy.before, vacancy.after, vacancy.contents, reason, avoid)
        self.report_recovered(hops, vacancy.which, fresh, began)
        return vacancy.which, fresh

    async def begin_again(
        self, hops: Sequence[HopSession], index: int, contents: Callable[[range], CacheContents]
    ) -> tuple[range, list[HopSession]]:
        """New sessions for `hops[index]` and all behind it, which have computed something unknown to this client: at
        the same servers, or at others if these cannot. Returns which hops they replace, and the new ones.

        Only this client knows the ids of the new sessions, so what was pushed to the former ones does not reach them.
        Raises the same as `repair`.
        """
        which = range(index, len(hops))
        wanted = contents(which)
        if wanted.done < wanted.history.folded:
            # It was filled by a replay when those behind had not answered all of that: one after the other.
            wanted = contents(which := range(index, index + 1))
        misled, (before, after) = hops[index : which.stop], _neighbors(hops, which)
        for hop in misled:
            hop.progress.on_replaced()
        await close_all(misled)
        fresh, error = await self._opener.prepare(route_of(misled), wanted)
        if error is not None:
            fresh = await self._opener.find(joined_span(misled), before, after, wanted, error)
        self._report_route([*hops[:index], *fresh, *hops[which.stop :]])
        return which, fresh

    async def link(self, hops: Sequence[HopSession], which: range, rows: int = 1, silent: int | None = None) -> None:
        """Tell the servers of `hops[which]` their neighbors, as far as they should push to each other.

        Args:
            rows: how many a pushed step may have.
            silent: `hops[silent]` is told not to push.
        """
        if not self._context.options.push:
            return
        for index in which:
            before = hops[index - 1] if index and self._may_push(hops[index - 1], hops[index]) else None
            after = hops[index + 1] if index + 1 < len(hops) and index != silent else None
            if after is not None and not self._may_push(hops[index], after):
                after = None
            await hops[index].link(before, after, rows)

    def _may_push(self, before: HopSession, after: HopSession) -> bool:
        # No server connects to itself.
        return before.peer_id != after.peer_id and self._routes.may_push(before.peer_id, after.peer_id)

    async def has_others(self, hops: Sequence[HopSession], index: int) -> bool:
        """Whether other servers than that of `hops[index]` can take its place."""
        hop, (before, after) = hops[index], _neighbors(hops, range(index, index + 1))
        try:
            await self._routes.route(hop.hop.span, before, after, self._context.max_length, frozenset({hop.peer_id}))
        except MissingBlocks:
            return False
        return True

    def report_recovered(
        self, hops: Sequence[HopSession], which: range, fresh: Sequence[HopSession], began: float
    ) -> None:
        """Others have taken the place of `hops[which]`, which were found wanting at `began`."""
        seconds = time.perf_counter() - began
        self._context.emit(Recovered(seconds))
        route = self._report_route([*hops[: which.start], *fresh, *hops[which.stop :]])
        logger.info("replaced in %.2f s; %s", seconds, route)

    def _report_route(self, hops: Sequence[HopSession]) -> Route:
        route = route_of(hops)
        self._routes.report_route(route)
        self._context.emit(RouteTaken(route))
        return route

    async def leave(self, failed: HopSession, is_doubted: bool = False) -> None:
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
        await close_all([failed])

    async def _try_same_server(self, hop: HopSession, contents: CacheContents) -> bool:
        """Whether the same server can go on, because only the connection or its memory of the session was lost.

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
            if progress.stale and (failed := await self._opener.replay([hop], contents)) is not None:
                _, failure = failed
        except TimeoutError:
            failure = PeerTimeout(
                f"{describe_hop(hop.hop)} did not accept a new connection within {RECONNECT_TIMEOUT_S} s"
            )
        except RemoteError as refused:
            failure = without_frames(refused)
        if failure is not None:
            logger.debug("%s does not come back: %s", describe_hop(hop.hop), failure)
        elif isinstance(error, PeerLost):
            logger.info("%s is connected again, after %s", describe_hop(hop.hop), error)
        progress.on_repair_ended((error or failure) if failure is not None else None)
        return failure is None
