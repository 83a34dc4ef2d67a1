"""Looks at the swarm again and again, and hands what it saw to whoever asks or listens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from swarm.data_structures import ModelInfo
from swarm.errors import SwarmError
from swarm.monitor.dht_source import DhtSource, PollResult, SwarmSource, reachable
from swarm.monitor.history import SwarmHistory
from swarm.monitor.swarm_view import VERSION, SwarmView, model_view
from swarm.transport.addresses import is_loopback

logger = logging.getLogger(__name__)

PERIOD = 10.0
"""Seconds between looks while somebody watches."""

IDLE_PERIOD = 60.0
IDLE_AFTER = 120.0
"""So long after the last question it looks only so often, for the history."""

REMEMBERED = 3600.0
"""Seconds that a model is shown after its last server is gone."""

WRITE_PERIOD = 300.0
"""Seconds between writes of the history's file."""


@dataclass(frozen=True, slots=True)
class PublishedView:
    """What the watch knows now; `number` counts up, `data` is the view as JSON."""

    number: int
    view: SwarmView
    data: bytes


class SwarmPoller:
    """Make it anywhere, start and stop it in the asyncio loop that it is to run in.

    Args:
        initial_peers: addresses of peers of the swarm.
        models: names to which it is limited; empty for all.
        period: seconds between looks while somebody watches.
        history: file that keeps the history over a restart; None for none.
        source: where it looks, if not at the swarm of the initial peers.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        models: Sequence[str] = (),
        period: float = PERIOD,
        history: Path | None = None,
        source: SwarmSource | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.history = SwarmHistory.read(history, now()) if history is not None else SwarmHistory()
        self.latest: PublishedView | None = None
        self._source = source or DhtSource(initial_peers, models)
        # Who reads the page may be on another machine, for whom this machine's own addresses say nothing.
        self._addresses = tuple(address for address in initial_peers if not is_loopback([address]))
        self._period = period
        self._file = history
        self._now = now
        self._remembered: dict[str, tuple[ModelInfo, float]] = {}
        self._round_trips: dict[str, float] = {}
        self._asked = self._looked = time.monotonic()
        self._failures = 0
        self._written = time.monotonic()
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look. A swarm that cannot be reached is tried again and again, and the view says so."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Let the listeners go, write the history, leave the swarm."""
        self.hang_up()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._write()
        await self._source.close()

    def hang_up(self) -> None:
        """Let the listeners go, and nobody listen any more: before a web server that waits for its last answers."""
        self._closing = True
        self._tell()

    def asked(self) -> None:
        """Somebody wants to know: look often for a while, and at once if the last look is old."""
        self._asked = time.monotonic()
        if self._asked - self._looked > self._period:
            self._wanted.set()

    async def after(self, number: int) -> PublishedView | None:
        """What was seen after the one of this number, as soon as there is something; None when the watch ends."""
        while not self._closing and (self.latest is None or self.latest.number <= number):
            await self._changed.wait()
        return None if self._closing else self.latest

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look()
                self._failures = 0
            except Exception as error:
                self._failures += 1
                problem = str(error) if isinstance(error, SwarmError) else f"looking at the swarm failed: {error!r}"
                logger.warning("%s; trying again", problem)
                self._publish(self._with_problem(problem))
            if time.monotonic() - self._written > WRITE_PERIOD:
                await self._write()
            self._looked = time.monotonic()
            self._wanted.clear()
            with suppress(TimeoutError):
                # A look that takes long is not followed by the next one at once.
                async with asyncio.timeout(max(self._pause() - (self._looked - began), self._period / 2)):
                    await self._wanted.wait()

    async def look(self) -> SwarmView:
        """Look once, and tell what was seen. Raises what the source raises."""
        now = self._now()
        look = await self._source.look(self._still_remembered(now))
        peers = reachable(look)
        if not set(peers) <= set(self._round_trips):
            # New servers are shown before they are measured.
            self._publish(swarm_view(look, self._round_trips, self._addresses, now, self._period))
        self._round_trips = await self._source.round_trips(peers)
        view = swarm_view(look, self._round_trips, self._addresses, now, self._period)
        for found in look.found:
            if found.servers:
                self._remembered[found.model.name] = (found.model, now)
        self.history.add(view)
        self._publish(view)
        return view

    def _with_problem(self, problem: str) -> SwarmView:
        if self.latest is None:
            return SwarmView(VERSION, self._now(), self._period, problem, (), (), 0)
        return replace(self.latest.view, problem=problem)

    def _still_remembered(self, now: float) -> list[ModelInfo]:
        self._remembered = {
            name: (info, when) for name, (info, when) in self._remembered.items() if now - when <= REMEMBERED
        }
        return [info for info, _ in self._remembered.values()]

    def _pause(self) -> float:
        idle = time.monotonic() - self._asked > IDLE_AFTER
        return max(self._period, IDLE_PERIOD if idle else min(self._period * 2**self._failures, IDLE_PERIOD))

    def _publish(self, view: SwarmView) -> None:
        number = self.latest.number + 1 if self.latest is not None else 1
        self.latest = PublishedView(number, view, msgspec.json.encode(view))
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _write(self) -> None:
        self._written = time.monotonic()
        if self._file is None:
            return
        try:
            await asyncio.to_thread(self.history.write, self._file)
        except OSError as error:
            logger.warning("the history was not written to %s: %s", self._file, error.strerror)


async def look_once(source: SwarmSource, addresses: Sequence[str], period: float) -> SwarmView:
    """What there is to see now, without a watch. Raises what the source raises.

    Args:
        addresses: of peers to join by, for the commands.
        period: seconds until the next look.
    """
    look = await source.look(())
    return swarm_view(look, await source.round_trips(reachable(look)), addresses, time.time(), period)


def swarm_view(
    look: PollResult, round_trips: Mapping[str, float], addresses: Sequence[str], now: float, period: float
) -> SwarmView:
    """What is to be said of one look. Pure."""
    models = [model_view(found, round_trips, addresses) for found in look.found]
    # Anybody can name models; those that somebody serves come first.
    models.sort(key=lambda model: (model.servers_online == 0, -model.servers_total))
    # Names that differ only in what cannot be printed would be taken for one model; who is served better keeps it.
    shown = {model.name: model for model in reversed(models)}
    models = [model for model in models if shown[model.name] is model]
    return SwarmView(VERSION, now, period, "", tuple(models), look.absent, look.left_out)
