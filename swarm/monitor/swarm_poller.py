"""Reads the swarm's state from its DHT again and again, and keeps it for requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from swarm.data_structures import ModelInfo, ServerState
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost, SwarmError
from swarm.membership.invite import Invite
from swarm.monitor.history import SwarmHistory
from swarm.monitor.swarm_view import NO_OPINIONS, VIEW_VERSION, AnnouncedModel, SwarmView, build_model_view, shorten
from swarm.routing.round_trips import RoundTrips
from swarm.routing.suspicion import Opinion
from swarm.transport.addresses import is_loopback
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.ping import ping_many

logger = logging.getLogger(__name__)

MAX_MODELS = 32
MAX_BLOCKS = 4096
"""Limits on the models, and on the blocks of all of them, that are read: each block takes one DHT request."""

POLL_TIMEOUT_S = 30.0
"""Limit for one poll."""

PINGS_PER_POLL = 32
PING_TIMEOUT_S = 4.0
"""Number of servers that are pinged after a poll, and the limit for all of these pings."""

EMPTY_POLLS_BEFORE_REJOIN = 3
REJOIN_AFTER_S = 60.0
"""After this many polls without a model, and this much time, the peer joins again: a peer that has lost all peers it
knew cannot find the swarm any more, even if the initial peers are back."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one poll found.

    Attributes:
        found: the models, and their servers.
        absent: models asked for that no server announces.
        left_out: models that were not looked at.
        others: names of models that were not asked for, if some that were are absent.
    """

    models: tuple[AnnouncedModel, ...]
    absent: tuple[str, ...] = ()
    left_out: int = 0
    others: tuple[str, ...] = ()


OpinionSource = Callable[[], Mapping[str, Opinion]]
"""Peer id -> what audits say of a server now. Raises `OpinionFileError`."""


def select_models(
    listed: Sequence[ModelInfo], remembered: Sequence[ModelInfo], requested: Sequence[str]
) -> tuple[list[ModelInfo], tuple[str, ...], int]:
    """Select the models to read. Pure. Returns them, the requested ones that are absent, and the number left out.

    Args:
        listed: as listed by the DHT, those that most peers announce first.
        remembered: models seen before.
        requested: names of the models to show; empty for all.
    """
    by_name = {info.name: info for info in [*remembered, *listed]}  # listed entries are newer
    names = list(dict.fromkeys(info.name for info in [*listed, *remembered]))
    if requested:
        names = [name for name in dict.fromkeys(requested) if name in by_name]
    selected: list[ModelInfo] = []
    blocks_left = MAX_BLOCKS
    for name in names:
        if len(selected) < MAX_MODELS and by_name[name].blocks <= blocks_left:
            selected.append(by_name[name])
            blocks_left -= by_name[name].blocks
    absent = tuple(name for name in dict.fromkeys(requested) if name not in by_name)
    return selected, absent, len(names) - len(selected)


class DhtSource:
    """Reads the DHT of the swarm that the initial peers belong to.

    Args:
        initial_peers: addresses.
        membership: this peer's invite to a private swarm; None for an open swarm.
        models: names of the models to read; empty for all.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        models: Sequence[str] = (),
        membership: Invite | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = P2PConfig(initial_peers=initial_peers, membership=membership)
        self._models = tuple(models)
        self._clock = clock
        self._peer: Peer | None = None
        self._lost: asyncio.Task[None] | None = None
        self._joined = 0.0
        self._empty = 0
        self._measured = RoundTrips(lifetime=120.0)
        self._tried: dict[str, float] = {}

    async def join(self) -> None:
        """Join the swarm unless it has already joined. Raises `PeerUnreachable` or `PeerLost`."""
        if self._peer is not None and self._lost is not None and self._lost.done():
            await self.close()  # its daemon has ended
        if self._peer is None:
            self._peer = await Peer.create(self._config, AnnouncementValidator())
            self._lost = asyncio.create_task(self._peer.wait_until_cut_off())
            self._joined, self._empty = self._clock(), 0

    async def poll(self, remembered: Sequence[ModelInfo] = ()) -> PollResult:
        """Fetch the models that are announced, and those in `remembered` that no longer are. Raises `SwarmError`."""
        if self._empty >= EMPTY_POLLS_BEFORE_REJOIN and self._clock() - self._joined >= REJOIN_AFTER_S:
            await self.close()
        await self.join()
        assert self._peer is not None
        dht = self._peer.dht
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                listed = await fetch_models(dht)
                models, absent, left_out = select_models(listed, remembered, self._models)
                servers = await asyncio.gather(*(fetch_servers(dht, model.name, model.blocks) for model in models))
        except TimeoutError:
            raise PeerLost(f"the swarm did not answer within {POLL_TIMEOUT_S:g} s") from None
        self._empty = 0 if listed else self._empty + 1
        others = tuple(one.name for one in listed if absent and one not in models)[:MAX_MODELS]
        return PollResult(tuple(map(AnnouncedModel, models, map(tuple, servers))), absent, left_out, others)

    async def round_trips(self, peer_ids: Iterable[str]) -> dict[str, float]:
        """Measure some of the peers; returns the round trips of all peers measured recently, in seconds."""
        assert self._peer is not None
        peers = list(dict.fromkeys(peer_ids))
        # Order by the last attempt, not the last success: peers that never answer must not block the others.
        pinged = sorted(peers, key=lambda peer: self._tried.get(peer, -1.0))[:PINGS_PER_POLL]
        measured = await ping_many(self._peer, pinged, concurrency=PINGS_PER_POLL, limit=PING_TIMEOUT_S)
        now = self._clock()
        self._tried = {peer: when for peer, when in self._tried.items() if peer in set(peers)}
        self._tried.update(dict.fromkeys(pinged, now))
        for peer in pinged:
            if peer in measured:
                self._measured.record(peer, measured[peer], now)
            else:
                self._measured.forget(peer)
        return self._measured.recent(now)

    async def close(self) -> None:
        """Leave the swarm."""
        peer, self._peer = self._peer, None
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.cancel()
            with suppress(asyncio.CancelledError):
                await lost
        if peer is not None:
            await peer.shutdown()


def peers_to_ping(look: PollResult) -> list[str]:
    """Ids of the peers whose round trip is worth measuring."""
    return [
        server.peer_id for models in look.models for server in models.servers if server.state is not ServerState.OFFLINE
    ]


PERIOD_S = 10.0
"""Time between polls while clients are watching."""

IDLE_PERIOD_S = 60.0
IDLE_AFTER_S = 120.0
"""`IDLE_AFTER_S` after the last request it polls only every `IDLE_PERIOD_S`, for the history."""

MODEL_RETENTION_S = 3600.0
"""Time for which a model is shown after its last server is gone."""


class SwarmPoller:
    """Polls the swarm in a background task. Create it anywhere; start and stop it in the event loop that runs it.

    Args:
        initial_peers: addresses of peers of the swarm.
        models: names of the models to show; empty for all.
        period: seconds between polls while clients are watching.
        source: where to read the state; by default the swarm of the initial peers.
        membership: this peer's invite to a private swarm; None for an open swarm.
        opinions: called in another thread; by default, nothing is known of any server.
        now: returns the Unix time in seconds.

    Attributes:
        latest: the newest view; None until `was_read` is set.
        latest_json: the same, encoded once for all who ask.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        models: Sequence[str] = (),
        period: float = PERIOD_S,
        source: DhtSource | None = None,
        membership: Invite | None = None,
        opinions: OpinionSource = dict,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.history = SwarmHistory()
        self.latest: SwarmView | None = None
        self.latest_json = b""
        self.was_read = asyncio.Event()
        self._source = source or DhtSource(initial_peers, models, membership)
        # A reader of the page may be on another machine, where loopback addresses are of no use.
        self._addresses = tuple(address for address in initial_peers if not is_loopback([address]))
        self._period = period
        self._opinions = opinions
        self._now = now
        self._remembered: dict[str, tuple[ModelInfo, float]] = {}
        self._round_trips: dict[str, float] = {}
        self._asked = self._looked = time.monotonic()
        self._failures = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to poll. A swarm that cannot be reached is tried again, and the view reports the problem."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Leave the swarm."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._source.close()

    def request_update(self) -> None:
        """Note a client's interest: poll often for a while, and at once if the last poll is old."""
        self._asked = time.monotonic()
        if self._asked - self._looked > self._period:
            self._wanted.set()

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
        opinions = await asyncio.to_thread(self._opinions)
        peers = peers_to_ping(result)
        if not set(peers) <= set(self._round_trips):
            # Show new servers before they are measured.
            self._publish(build_swarm_view(result, self._round_trips, self._addresses, now, self._period, opinions))
        self._round_trips = await self._source.round_trips(peers)
        view = build_swarm_view(result, self._round_trips, self._addresses, now, self._period, opinions)
        for announced in result.models:
            if announced.servers:
                self._remembered[announced.model.name] = (announced.model, now)
        self.history.record(view)
        self._publish(view)
        return view

    def _with_problem(self, problem: str) -> SwarmView:
        if self.latest is None:
            return SwarmView(VIEW_VERSION, self._now(), self._period, problem, (), (), 0)
        return replace(self.latest, problem=problem)

    def _remembered_models(self, now: float) -> list[ModelInfo]:
        self._remembered = {
            name: (info, when) for name, (info, when) in self._remembered.items() if now - when <= MODEL_RETENTION_S
        }
        return [info for info, _ in self._remembered.values()]

    def _pause(self) -> float:
        idle = time.monotonic() - self._asked > IDLE_AFTER_S
        return max(self._period, IDLE_PERIOD_S if idle else min(self._period * 2**self._failures, IDLE_PERIOD_S))

    def _publish(self, view: SwarmView) -> None:
        self.latest, self.latest_json = view, msgspec.json.encode(view)
        self.was_read.set()


async def poll_once(
    source: DhtSource, addresses: Sequence[str], period: float, opinions: Mapping[str, Opinion] = NO_OPINIONS
) -> SwarmView:
    """Read the current state without a `SwarmPoller`. Raises what the source raises.

    Args:
        addresses: addresses of peers to join by, for the commands.
        period: seconds until the next poll.
        opinions: what audits say of servers.
    """
    result = await source.poll(())
    trips = await source.round_trips(peers_to_ping(result))
    return build_swarm_view(result, trips, addresses, time.time(), period, opinions)


def build_swarm_view(
    result: PollResult,
    round_trips: Mapping[str, float],
    addresses: Sequence[str],
    now: float,
    period: float,
    opinions: Mapping[str, Opinion] = NO_OPINIONS,
) -> SwarmView:
    """Build the view of one poll. Pure."""
    models = [build_model_view(announced, round_trips, addresses, opinions) for announced in result.models]
    # Any peer can announce models; those with servers come first.
    models.sort(key=lambda model: (model.servers_online == 0, -model.servers_total))
    # Names that differ only in unprintable characters would look like one model; the one with better servers keeps it.
    shown = {model.name: model for model in reversed(models)}
    models = [model for model in models if shown[model.name] is model]
    return SwarmView(
        VIEW_VERSION, now, period, "", tuple(models), result.absent, result.left_out, tuple(map(shorten, result.others))
    )
