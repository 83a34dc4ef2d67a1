"""The hops of one session, in the order of its route: how they are linked, repaired and replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from swarm.client.chain.failover import CacheContents, Failover
from swarm.client.chain.hop_session import HopSession
from swarm.client.chain.session_constants import SessionContext
from swarm.client.chain.steps_under_way import StepsUnderWay
from swarm.client.routes.route_source import is_worth_another_server
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.client.wire.reply_checks import describe_hop
from swarm.data_structures import HopTiming, Route

logger = logging.getLogger(__name__)


class LinkedHops:
    """The hops of one session. Each server pushes to the next, unless that failed.

    Args:
        context: the constants of the session.
        under_way: steps that hops may still have to answer.
        on_reply, on_change: see `HopSession`.
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
        self._failover = Failover(context, on_reply, on_change)
        self._hops: list[HopSession] = []
        self._unlinked = False

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[HopSession]:
        return iter(self._hops)

    def __getitem__(self, index: int) -> HopSession:
        return self._hops[index]

    @property
    def route(self) -> Route:
        """The servers in use now."""
        return Route(tuple(hop.hop for hop in self._hops))

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

    async def open(self) -> None:
        """Find a route and reserve cache space on its servers. Raises `MissingBlocks` or a `RemoteError`."""
        self._hops = await self._failover.open(self._context.span)

    async def close(self) -> None:
        """Free the session on all servers."""
        await asyncio.gather(*(hop.close() for hop in self._hops))

    async def link_again(self) -> None:
        """Let all servers push. Only while no step is under way."""
        if self._unlinked:
            self._unlinked = False
            await self._failover.link(self._hops, range(len(self._hops)))

    async def repair(self, index: int, foldable: int, several: bool) -> None:
        """Repair a hop, or put other servers in the place of its server. Raises its error if none would do better.

        Args:
            foldable: the last step that caches are filled with; a later one may still be given up.
            several: whether several steps may be under way.
        """
        progress = self._hops[index].progress
        progress.on_departure_due()
        if progress.error is not None and not is_worth_another_server(progress.error):
            raise progress.take_error()
        which, repaired = await self._failover.repair(self._hops, index, lambda hops: self._contents(hops, foldable))
        first, last = which.start, which.start + len(repaired)
        self._hops[first : which.stop] = repaired
        for hop in repaired:
            hop.progress.on_joined(self._under_way.next_number - 1, hop.history.last)
            for number, step in self._under_way.steps.items():
                if hop.progress.replied < number:
                    hop.expect(number, step.outputs)
        # Only now, because from now on steps may be pushed to them.
        neighbors = range(max(0, first - 1), min(len(self._hops), last + 1))
        if first and (several or len(repaired[0].progress.steps.numbers()) > 1):
            # It has to catch up first: it would refuse what the server before pushes meanwhile.
            self._unlinked = True
            await self._failover.link(self._hops, neighbors, silent=first - 1)
        else:
            await self._failover.link(self._hops, neighbors)

    def _contents(self, which: range, foldable: int) -> CacheContents:
        """What the caches of some successive hops have to hold together: not more than all of them have answered, or
        their outputs of the steps behind that would never come."""
        hops = self._hops[which.start : which.stop]
        done = min(foldable, hops[0].progress.received, *(hop.progress.replied for hop in hops))
        return CacheContents(hops[0].history, done, *self._under_way.upcoming(done))

    async def stop_pushes_to(self, index: int, several: bool) -> None:
        """What was pushed to a hop did not arrive there, or was refused, so this client has to deliver it itself.

        Which of the two servers is at fault cannot be known, so neither is blamed; but it happens once, not each step.
        If several steps are under way it may just have missed one. Then they may try again afterwards.
        """
        self._unlinked = self._unlinked or several
        self._hops[index].progress.on_pushes_stopped()
        pusher = self._hops[index - 1]
        logger.debug("%s no longer pushes: a push failed", describe_hop(pusher.hop))
        await pusher.link(self._hops[index - 2] if index > 1 else None, None)
