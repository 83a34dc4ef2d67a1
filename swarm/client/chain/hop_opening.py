"""Opening a session at servers, and filling their caches with the history of what went in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.client.chain.prefix import PrefixHop
from swarm.client.hops.hop_progress import NO_STEP
from swarm.client.hops.hop_session import CACHE_WAIT_S, HopSession, SessionContext
from swarm.client.hops.input_history import InputHistory, first_tokens
from swarm.client.routes.events import Replayed
from swarm.client.routes.route_source import MIN_ROUTES_TRIED, MissingBlocksWait, is_worth_another_server, not_finite
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import Route, Span
from swarm.errors import CacheFull, MissingBlocks, NotFiniteOutputs, PeerLost, RemoteError
from swarm.protocol import messages


@dataclass(frozen=True)
class CacheContents:
    """What the caches of a hop have to hold.

    Attributes:
        history: the hop's inputs.
        done: number of the last step that is replayed.
        upcoming: number of the step that will be delivered next; steps between these two are void.
        epoch: of that step, unless it begins one.
        rows: sequences for which cache is reserved at once; the steps that follow bring as many.
    """

    history: InputHistory = field(default_factory=InputHistory)
    done: int = NO_STEP
    upcoming: int = 0
    epoch: int = 0
    rows: int = 1


class HopOpener:
    """Opens hops of one session.

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
        self._room_timeout: float | None = None
        self._full: dict[str, CacheFull] = {}
        """Servers without room, while the caller waits for that itself."""
        self._refusers: dict[str, RemoteError] = {}
        """Servers that say that every server would refuse, and why. If others take the session, they were wrong."""

    async def find(
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
                avoided = avoid | self._refusers.keys() | self._full.keys()
                route = await self._routes.route(span, before, after, self._context.max_length, avoided)
                hops, last_error = await self.prepare(route, contents)
                if last_error is None:
                    self._blame_refusers()
                    return hops
                tries += 1
                if tries >= MIN_ROUTES_TRIED and wait.is_over(last_error):
                    raise last_error
            except MissingBlocks as missing:
                if self._full:
                    raise self._full.popitem()[1] from None
                is_over = missing.all_wrong and isinstance(last_error, NotFiniteOutputs)
                if last_error is not None and (is_over or not is_worth_another_server(last_error)):
                    self._refusers.clear()
                    raise last_error from None  # waiting makes no server larger, and no number smaller
                if isinstance(last_error, CacheFull) and wait.is_over(last_error):
                    raise last_error from None
                await wait.wait(missing, last_error)

    async def prepare(self, route: Route, contents: CacheContents) -> tuple[list[HopSession], RemoteError | None]:
        """Hops over a route, with their caches filled, and None; or why that failed, all closed again."""
        histories = [contents.history, *(InputHistory() for _ in route.hops[1:])]
        hops = [
            HopSession(self._context, hop, self._on_reply, self._on_change, history)
            for hop, history in zip(route.hops, histories, strict=True)
        ]
        try:
            error = await self._open_all(hops, contents.rows)
            if error is None and (failed := await self.replay(hops, contents)) is not None:
                error = self.report_failure(*failed)
        except BaseException:  # also when the user interrupts
            await close_all(hops)
            raise
        if error is not None:
            await close_all(hops)
            return [], error
        for hop in hops:
            self._routes.report_success(hop.peer_id)
        return hops, None

    async def resume(self, parts: Sequence[PrefixHop], length: int) -> tuple[list[HopSession], int]:
        """Hops at the servers that computed a prefix, and with how many of its positions they begin: with none if no
        server has any of them.

        They begin with as much as all servers have, except servers that have less than half of the longest. A hop whose
        server has too little is stale, and one whose server is gone has an error: the caller repairs both. If the
        servers that are left have nothing, or one has no room, the list of hops is empty.
        """
        hops = [HopSession(self._context, part.hop, self._on_reply, self._on_change) for part in parts]
        try:
            results = await asyncio.gather(
                *(
                    self._open_with(hop, messages.PrefixOf(part.session_id, length))
                    for hop, part in zip(hops, parts, strict=True)
                ),
                return_exceptions=True,
            )
            longest = max(hop.begun for hop in hops)
            length = min(hop.begun for hop in hops if hop.begun >= longest / 2)
            for hop, part, result in zip(hops, parts, results, strict=True):
                if length:
                    hop.history, hop.filled_to = InputHistory((first_tokens(part.inputs, length),)), length
                if hop.begun < length:
                    hop.progress.on_forgotten()
                if isinstance(result, RemoteError):
                    hop.progress.on_failed(result)
                    self._note_full(hop, result)
                elif isinstance(result, BaseException):
                    raise result
        except BaseException:
            await close_all(hops)
            raise
        if self._full or (not length and any(hop.progress.error is not None for hop in hops)):
            await close_all(hops)
            return [], 0
        return hops, length

    async def _open_with(self, hop: HopSession, prefix: messages.PrefixOf) -> None:
        if not self._routes.offers(hop.hop):
            raise PeerLost(f"{describe_hop(hop.hop)} is not there any more")
        await hop.open(1, prefix, self._wait_s)

    async def _open_all(self, hops: Sequence[HopSession], rows: int) -> RemoteError | None:
        """Open all hops at once; why one of them could not be opened, or None."""
        error: RemoteError | None = None
        opening = (hop.open(rows, wait_s=self._wait_s) for hop in hops)
        results = await asyncio.gather(*opening, return_exceptions=True)
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, RemoteError):
                error = self.report_failure(hop, result)
            elif isinstance(result, BaseException):
                raise result
        return error

    async def replay(
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

    def report_failure(self, hop: HopSession, error: RemoteError) -> RemoteError:
        """Report the server; but if it says that every server would refuse, only when another one has not."""
        if not is_worth_another_server(error):
            self._refusers[hop.peer_id] = error
        elif not self._note_full(hop, error):
            self._routes.report_failure(hop.peer_id, error)
        return not_finite(hop.hop) if isinstance(error, NotFiniteOutputs) else error

    @property
    def _wait_s(self) -> float:
        return CACHE_WAIT_S if self._room_timeout is None else self._room_timeout

    def _note_full(self, hop: HopSession, error: RemoteError) -> bool:
        """Whether the server had no room, and the caller waits for that; then it is avoided until the next attempt."""
        if self._room_timeout is None or not isinstance(error, CacheFull):
            return False
        self._full[hop.peer_id] = error
        return True

    @contextmanager
    def waiting_for_room(self, room_timeout: float | None) -> Iterator[None]:
        """Inside, full servers let hops wait for so many seconds. Then `CacheFull` is raised, and the caller tries
        again, so they are not reported. None to wait as for lost servers.
        """
        self._room_timeout = room_timeout
        try:
            yield
        finally:
            self._room_timeout = None
            self._full.clear()

    def _blame_refusers(self) -> None:
        for peer_id, error in self._refusers.items():
            self._routes.report_failure(peer_id, error)
        self._refusers.clear()


def route_of(hops: Sequence[HopSession]) -> Route:
    """The servers of successive hops."""
    return Route(tuple(hop.hop for hop in hops))


def neighbors_of(hops: Sequence[HopSession], which: range) -> tuple[str | None, str | None]:
    """Peer ids of the servers before and behind some hops; None for this client."""
    before = hops[which.start - 1].peer_id if which.start else None
    return before, hops[which.stop].peer_id if which.stop < len(hops) else None


def joined_span(hops: Sequence[HopSession]) -> Span:
    """The blocks of successive hops."""
    return Span(hops[0].hop.span.start, hops[-1].hop.span.end)


async def close_all(hops: Sequence[HopSession], keep: int = 0) -> None:
    """Free the session at some servers, except for `keep` positions that they may keep.

    Where this is canceled, they are not told, but all streams are closed.
    """
    try:
        await asyncio.gather(*(hop.close(keep) for hop in hops))
    finally:
        for hop in hops:
            hop.hang_up()  # those of which closing was canceled before it had begun
