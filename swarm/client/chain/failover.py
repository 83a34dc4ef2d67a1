"""Putting another server in the place of one that was lost, in the middle of a session (Petals, section 3.2).

The blocks of the lost server are routed again, perhaps cut differently; the record of what went into them is replayed
to the new servers, which then have the same caches; the servers before and behind are told of their neighbours. Nobody
else in the route starts again.

Laws:
- The step that was running is delivered again. Servers know a step that they have seen, so it is computed once.
- A server that failed is reported to the planner, which keeps it out of routes for a while.
- When nobody holds the blocks, waiting for a server is the only thing to do; after `Planner.patience` it is an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.client.chain.hop_session import NOTHING_YET, PARDONS, HopSession
from swarm.client.chain.input_history import Record
from swarm.client.routes.events import (
    BlocksMissing,
    EventListener,
    HopLost,
    Recovered,
    Replayed,
    RouteTaken,
    ignore_events,
)
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.client.wire.request_options import RequestOptions
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
    WrongPosition,
)
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)

REFRESH = 1.0
"""Seconds between looks for new servers while blocks are missing."""

TRIES = 3
"""Routes that are tried at least, however short the planner's patience is."""

RECONNECT = 0.5
"""Seconds to find out whether only the connection was lost, not the server."""


class Planner(Protocol):
    """What a session needs to know of the swarm.

    Attributes:
        patience: seconds to wait for blocks that nobody holds.
    """

    patience: float

    async def route(self, span: Span, before: str | None, after: str | None, max_length: int) -> Route:
        """A route over `span` between two servers (None: this client). Raises `MissingBlocks`."""

    async def refresh(self) -> None:
        """Look at the swarm again."""

    def failed(self, peer_id: str, error: Exception) -> None:
        """Keep the peer out of routes for a while."""

    def succeeded(self, peer_id: str) -> None:
        """The peer works."""

    def slowness(self, peer_id: str) -> float:
        """How many times longer than it announces the peer should be given."""

    def taken(self, route: Route) -> None:
        """The session goes by this route from now on."""


def is_hop_lost(error: Exception) -> bool:
    """True if another server should be asked. Only what every server would refuse is the client's own matter: what may
    be too long for all, outputs that the wire format cannot hold, and adapters that do not fit to the blocks.

    Whatever else could be wrong with a request was checked before it was sent: a server that refuses it errs or lies.
    """
    return not isinstance(error, TooLong | WrongDtype | AdapterRefused)


@dataclass(frozen=True)
class Past:
    """What the caches of a hop have to hold.

    Attributes:
        record: the hop's inputs.
        done: number of the last step that is replayed.
        upcoming: number of the step that will be delivered next; those below are void.
    """

    record: Record
    done: int
    upcoming: int


class Waiting:
    """Waiting for servers of blocks that nobody holds, for as long as the planner has patience."""

    def __init__(self, planner: Planner, tell: EventListener = ignore_events) -> None:
        self._planner = planner
        self._tell = tell
        self._deadline = time.perf_counter() + planner.patience
        self._said = False

    @property
    def is_over(self) -> bool:
        """True when nobody should wait any longer."""
        return time.perf_counter() >= self._deadline

    async def more(self, missing: MissingBlocks) -> None:
        """Wait a little and look at the swarm again. Raises `missing` when the patience has ended."""
        if self.is_over:
            raise missing from None
        if not self._said:
            logger.warning("%s Waiting up to %.0f s.", missing, self._planner.patience)
            self._tell(BlocksMissing(missing.blocks))
            self._said = True
        await asyncio.sleep(min(REFRESH, max(0.0, self._deadline - time.perf_counter())))
        await self._planner.refresh()


class Failover:
    """Opens and mends the hops of one session.

    Args:
        adapter: what is added to the blocks.
        heard, changed: see `HopSession`.
        tell: hears of what happens to the session.
    """

    def __init__(
        self,
        network: Network,
        planner: Planner,
        manner: RequestOptions,
        max_length: int,
        adapter: AdapterUpload,
        heard: Callable[[HopSession, int, PackedHidden], None],
        changed: Callable[[], None],
        tell: EventListener = ignore_events,
    ) -> None:
        self._tell = tell
        self._network = network
        self._planner = planner
        self._manner = manner
        self._max_length = max_length
        self._adapter = adapter
        self._heard = heard
        self._changed = changed

    async def open(self, span: Span) -> list[HopSession]:
        """New hops over `span`, linked, for a session that has not begun."""
        hops = await self._find(span, None, None, Past(Record(), NOTHING_YET, 0))
        try:
            await self.link(hops, range(len(hops)))
        except BaseException:  # also when the person interrupts
            await asyncio.gather(*(hop.close() for hop in hops))
            raise
        self._taken(Route(tuple(hop.hop for hop in hops)))
        return hops

    async def mend(self, hops: Sequence[HopSession], index: int, past: Past) -> list[HopSession]:
        """What takes the place of `hops[index]`: itself, if that can be, or other servers. They are not linked yet."""
        lost = hops[index]
        began = time.perf_counter()
        if await self._recovered(lost, past):
            return [lost]
        assert lost.error is not None
        if not lost.abandoned:  # once, or a server that has come back would be kept out again
            lost.abandoned = True
            logger.info("%s; looking for a replacement", lost.error)
            reason = lost.error.code if isinstance(lost.error, RemoteError) else RemoteError.code
            self._tell(HopLost(lost.peer_id, lost.hop.span, reason))
            self._planner.failed(lost.peer_id, lost.error)
            await lost.close()
        before = hops[index - 1].peer_id if index else None
        after = hops[index + 1].peer_id if index + 1 < len(hops) else None
        # Where nobody else has room either, that is what has to be said, not that blocks are missing.
        full = lost.error if isinstance(lost.error, CacheFull) else None
        fresh = await self._find(lost.hop.span, before, after, past, full)
        route = Route(tuple(hop.hop for hop in [*hops[:index], *fresh, *hops[index + 1 :]]))
        seconds = time.perf_counter() - began
        logger.info("replaced in %.2f s; %s", seconds, route)
        self._tell(Recovered(seconds))
        self._taken(route)
        return fresh

    def _taken(self, route: Route) -> None:
        self._planner.taken(route)
        self._tell(RouteTaken(route))

    async def link(self, hops: Sequence[HopSession], which: range, silent: int | None = None) -> None:
        """Tell the servers of `hops[which]` who stands before and behind them; `hops[silent]` is not to push."""
        if not self._manner.push:
            return
        for index in which:
            before = hops[index - 1] if index else None
            after = hops[index + 1] if index + 1 < len(hops) and index != silent else None
            await hops[index].link(before, after)

    async def _recovered(self, hop: HopSession, past: Past) -> bool:
        """True if the same server can go on: only the connection was lost, or what it remembered.

        It gets this chance a few times; then it has to answer a step before it gets another.
        """
        error = hop.error
        if not _may_recover(hop):
            return False
        trouble: RemoteError | None = None
        try:
            if isinstance(error, PeerLost | UnknownSession):
                async with asyncio.timeout(RECONNECT):
                    hop.stale = not hop.can_answer(await hop.open()) or hop.stale
            elif error is not None:
                hop.stale = True
            hop.error = None
            if hop.stale and (failed := await self._replay([hop], past)) is not None:
                _, trouble = failed
        except TimeoutError:
            trouble = PeerTimeout(f"{describe_hop(hop.hop)} did not let us in again within {RECONNECT} s")
        except RemoteError as again:
            trouble = again
        if trouble is not None:
            logger.debug("%s does not come back: %s", describe_hop(hop.hop), trouble)
            hop.error = error or trouble
        hop.pardons += 1
        return trouble is None

    async def _find(
        self, span: Span, before: str | None, after: str | None, past: Past, trouble: RemoteError | None = None
    ) -> list[HopSession]:
        """Open hops over `span` and fill their caches. `trouble` is why others were left."""
        tries = 0
        waiting = Waiting(self._planner, self._tell)
        while True:
            try:
                hops = self._hops(await self._planner.route(span, before, after, self._max_length))
                trouble = await self._prepare(hops, past)
                if trouble is None:
                    return hops
                tries += 1
                if (tries >= TRIES and waiting.is_over) or isinstance(trouble, AdapterRefused):
                    raise trouble
            except MissingBlocks as missing:
                if isinstance(trouble, TooLong | WrongDtype):
                    raise trouble from None  # waiting makes no server larger, and no number smaller
                if isinstance(trouble, CacheFull) and waiting.is_over:
                    raise trouble from None
                await waiting.more(missing)

    def _hops(self, route: Route) -> list[HopSession]:
        return [
            HopSession(
                self._network,
                hop,
                self._manner,
                self._max_length,
                self._heard,
                self._changed,
                self._planner.slowness(hop.server.peer_id),
                self._adapter,
            )
            for hop in route.hops
        ]

    async def _prepare(self, hops: list[HopSession], past: Past) -> RemoteError | None:
        """Open the hops and fill their caches. None if that worked, else why it did not, all closed again."""
        try:
            trouble = await self._open_all(hops)
            if trouble is None:
                hops[0].record = past.record
                if (failed := await self._replay(hops, past)) is not None:
                    trouble = self._blame(*failed)
        except BaseException:  # also when the person interrupts
            await asyncio.gather(*(hop.close() for hop in hops))
            raise
        if trouble is not None:
            await asyncio.gather(*(hop.close() for hop in hops))
            return trouble
        for hop in hops:
            self._planner.succeeded(hop.peer_id)
        return None

    async def _open_all(self, hops: Sequence[HopSession]) -> RemoteError | None:
        """Open all hops at once; why one of them could not be, or None."""
        trouble: RemoteError | None = None
        for hop, result in zip(
            hops, await asyncio.gather(*(hop.open() for hop in hops), return_exceptions=True), strict=True
        ):
            if isinstance(result, RemoteError):
                trouble = self._blame(hop, result)
            elif isinstance(result, BaseException):
                raise result
        return trouble

    async def _replay(self, hops: Sequence[HopSession], past: Past) -> tuple[HopSession, RemoteError] | None:
        """Fill the caches of `hops`; where and why that failed, or None."""
        tokens = 0
        for layout, hidden in past.record.replay(past.done):
            tokens += layout.tokens
            for hop, following in zip(hops, [*hops[1:], None], strict=True):
                try:
                    outputs = await hop.replay(layout, hidden, past.upcoming, want_outputs=following is not None)
                except RemoteError as error:
                    return hop, error
                if following is not None and outputs is not None:
                    following.record.add_replayed(layout, outputs, past.done)
                    hidden = outputs
        for hop in hops:
            hop.filled(past.done)
            if tokens:
                self._tell(Replayed(hop.hop.span, tokens))
        return None

    def _blame(self, hop: HopSession, error: RemoteError) -> RemoteError:
        """Tell the planner, but of what is nobody's fault but ours: what does not fit here fits nowhere."""
        if not isinstance(error, AdapterRefused):
            self._planner.failed(hop.peer_id, error)
        return error


def _may_recover(hop: HopSession) -> bool:
    """Whether it makes sense to go on with the same server."""
    if hop.error is None:
        return hop.stale
    if hop.abandoned or hop.pardons >= PARDONS or hop.leaving is not None:
        return False
    lost = isinstance(hop.error, PeerLost) and not isinstance(hop.error, PeerTimeout)
    return lost or isinstance(hop.error, UnknownSession | WrongPosition)
