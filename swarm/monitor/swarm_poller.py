"""Polls the swarm periodically and publishes its state to requests and streams."""

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
from swarm.membership.invite import Invite
from swarm.monitor.dht_source import DhtSource, PollResult, SwarmSource, peers_to_ping
from swarm.monitor.history import SwarmHistory
from swarm.monitor.swarm_view import VIEW_VERSION, SwarmView, build_model_view, shorten
from swarm.transport.addresses import is_loopback

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Time between polls while clients are watching."""

IDLE_PERIOD_S = 60.0
IDLE_AFTER_S = 120.0
"""`IDLE_AFTER_S` after the last request it polls only every `IDLE_PERIOD_S`, for the history."""

MODEL_RETENTION_S = 3600.0
"""Time for which a model is shown after its last server is gone."""

WRITE_PERIOD_S = 300.0
"""Time between writes of the history's file."""


@dataclass(frozen=True, slots=True)
class PublishedView:
    """The latest view. `number` counts up; `data` is the view as JSON."""

    number: int
    view: SwarmView
    data: bytes


class SwarmPoller:
    """Polls the swarm in a background task. Create it anywhere; start and stop it in the event loop that runs it.

    Args:
        initial_peers: addresses of peers of the swarm.
        models: names of the models to show; empty for all.
        period: seconds between polls while clients are watching.
        history: file that keeps the history across restarts; None for no file.
        source: where to read the state; by default the swarm of the initial peers.
        membership: this peer's invite to a private swarm; None for an open swarm.
        now: returns the Unix time in seconds.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        models: Sequence[str] = (),
        period: float = PERIOD_S,
        history: Path | None = None,
        source: SwarmSource | None = None,
        membership: Invite | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.history = SwarmHistory.read(history, now()) if history is not None else SwarmHistory()
        self.latest: PublishedView | None = None
        self._source = source or DhtSource(initial_peers, models, membership)
        # A reader of the page may be on another machine, where loopback addresses are of no use.
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
        """Begin to poll. A swarm that cannot be reached is tried again, and the view reports the problem."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End all streams, write the history, and leave the swarm."""
        self.end_streams()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._write()
        await self._source.close()

    def end_streams(self) -> None:
        """End all streams and accept no new ones, so that the web server can stop."""
        self._closing = True
        self._notify()

    def request_update(self) -> None:
        """Note a client's interest: poll often for a while, and at once if the last poll is old."""
        self._asked = time.monotonic()
        if self._asked - self._looked > self._period:
            self._wanted.set()

    async def wait_for_newer(self, number: int) -> PublishedView | None:
        """Wait for a view with a higher number. Returns None when the poller stops."""
        while not self._closing and (self.latest is None or self.latest.number <= number):
            await self._changed.wait()
        return None if self._closing else self.latest

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.poll()
                self._failures = 0
            except Exception as error:  # noqa: BLE001  (hivemind raises many types, and the next poll may succeed)
                self._failures += 1
                problem = str(error) if isinstance(error, SwarmError) else f"reading the swarm failed: {error!r}"
                logger.warning("%s; trying again", problem)
                self._publish(self._with_problem(problem))
            if time.monotonic() - self._written > WRITE_PERIOD_S:
                await self._write()
            self._looked = time.monotonic()
            self._wanted.clear()
            with suppress(TimeoutError):
                # A slow poll is not followed by the next one immediately.
                async with asyncio.timeout(max(self._pause() - (self._looked - began), self._period / 2)):
                    await self._wanted.wait()

    async def poll(self) -> SwarmView:
        """Poll once and publish the view. Raises what the source raises."""
        now = self._now()
        result = await self._source.poll(self._remembered_models(now))
        peers = peers_to_ping(result)
        if not set(peers) <= set(self._round_trips):
            # Show new servers before they are measured.
            self._publish(build_swarm_view(result, self._round_trips, self._addresses, now, self._period))
        self._round_trips = await self._source.round_trips(peers)
        view = build_swarm_view(result, self._round_trips, self._addresses, now, self._period)
        for announced in result.models:
            if announced.servers:
                self._remembered[announced.model.name] = (announced.model, now)
        self.history.record(view)
        self._publish(view)
        return view

    def _with_problem(self, problem: str) -> SwarmView:
        if self.latest is None:
            return SwarmView(VIEW_VERSION, self._now(), self._period, problem, (), (), 0)
        return replace(self.latest.view, problem=problem)

    def _remembered_models(self, now: float) -> list[ModelInfo]:
        self._remembered = {
            name: (info, when) for name, (info, when) in self._remembered.items() if now - when <= MODEL_RETENTION_S
        }
        return [info for info, _ in self._remembered.values()]

    def _pause(self) -> float:
        idle = time.monotonic() - self._asked > IDLE_AFTER_S
        return max(self._period, IDLE_PERIOD_S if idle else min(self._period * 2**self._failures, IDLE_PERIOD_S))

    def _publish(self, view: SwarmView) -> None:
        number = self.latest.number + 1 if self.latest is not None else 1
        self.latest = PublishedView(number, view, msgspec.json.encode(view))
        self._notify()

    def _notify(self) -> None:
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


async def poll_once(source: SwarmSource, addresses: Sequence[str], period: float) -> SwarmView:
    """Read the current state without a `SwarmPoller`. Raises what the source raises.

    Args:
        addresses: addresses of peers to join by, for the commands.
        period: seconds until the next poll.
    """
    result = await source.poll(())
    return build_swarm_view(result, await source.round_trips(peers_to_ping(result)), addresses, time.time(), period)


def build_swarm_view(
    result: PollResult, round_trips: Mapping[str, float], addresses: Sequence[str], now: float, period: float
) -> SwarmView:
    """Build the view of one poll. Pure."""
    models = [build_model_view(announced, round_trips, addresses) for announced in result.models]
    # Any peer can announce models; those with servers come first.
    models.sort(key=lambda model: (model.servers_online == 0, -model.servers_total))
    # Names that differ only in unprintable characters would look like one model; the one with better servers keeps it.
    shown = {model.name: model for model in reversed(models)}
    models = [model for model in models if shown[model.name] is model]
    return SwarmView(
        VIEW_VERSION, now, period, "", tuple(models), result.absent, result.left_out, tuple(map(shorten, result.others))
    )
