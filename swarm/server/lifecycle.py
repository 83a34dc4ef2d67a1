"""A server's life: join, choose blocks, load them, serve, move to where it is needed more, leave."""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from swarm.common.dtypes import dtype_name
from swarm.common.machine import ProcessorUse
from swarm.common.version import VERSION
from swarm.data_structures import Mobility, ModelInfo, ServerInfo, ServerState, Span
from swarm.dht.announcer import Announcer, adapter_names
from swarm.dht.directory import RelayDirectory, fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import DhtError, InvalidSpan, ServerClosing, SwarmError, UsageError
from swarm.metrics.endpoint import MetricsEndpoint
from swarm.metrics.registry import EventLoopMetrics, new_registry
from swarm.metrics.server import ServerObserver
from swarm.protocol import messages
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.config import ServerConfig
from swarm.server.placement.initial_blocks import block_throughputs, weakest_window
from swarm.server.placement.move_loop import MoveLoop
from swarm.server.resolved_config import ResolvedConfig, resolve_config
from swarm.server.sessions.points_desk import PointsDesk
from swarm.server.span_service import SpanService
from swarm.server.throughput.link_measurement import LinkMeasurement
from swarm.server.weight_source import WeightSharing, WeightSource
from swarm.transport.joining import join_network
from swarm.transport.p2p import Peer
from swarm.transport.process_folder import remove_abandoned_folders
from swarm.transport.stream import Stream
from swarm.trust.points import points_path

logger = logging.getLogger(__name__)

LEAVE_HAND_OVER_S = 1.5
"""How long a leaving server waits for clients to take their sessions elsewhere."""

MOVE_FINISH_S = 60.0
"""How long a moving server lets its sessions run before it hands them over."""

GOODBYE_TIMEOUT_S = 1.0
"""How long a leaving server tries to announce that it leaves."""

EXPIRY_PERIOD_S = 5.0
"""Time between checks for sessions whose client is gone and for adapters that have not been used."""

LAST_JOB_S = 2.0
"""How long a server that stops waits for what its compute thread computes: an iteration, if it is not loading."""

MAX_ANNOUNCED_QUEUE_S = 3600.0
"""Longest queue that an announcement may claim."""


class Server:
    """One server. `start` returns when it serves; `stop` takes it out of the swarm.

    Everything lives in the running asyncio loop and one compute thread, so several servers can share a process.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.span: Span | None = None
        self.start_phases: dict[str, float] = {}
        """Seconds that each part of the start took."""
        self._compute_thread = ComputeThread()
        self._state = ServerState.JOINING
        self._said_ready: bool | None = None
        self._service: SpanService | None = None
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None
        """By which early hidden states are read. Loaded once: it does not depend on the blocks."""
        self._throughput = config.throughput or 1.0
        """Blocks x tokens per second to announce while blocks are loading."""
        self._peer: Peer | None = None
        self._weights: WeightSource | None = None
        self._sharing: WeightSharing | None = None
        self._announcer: Announcer | None = None
        self._links: LinkMeasurement | None = None
        self._move_loop: MoveLoop | None = None
        self._background_tasks: list[asyncio.Task[None]] = []
        self._observer = ServerObserver()
        self._metrics: MetricsEndpoint | None = None
        self._points: PointsDesk | None = None

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus endpoint; empty if there is none."""
        return self._metrics.url if self._metrics is not None else ""

    @property
    def computing(self) -> bool:
        """Whether its compute thread has not ended: before `stop`, and after it where a job takes very long."""
        return self._compute_thread.thread.is_alive()

    @property
    def peer(self) -> Peer:
        """This server's place in the network, after `start`."""
        if self._peer is None:
            raise SwarmError("the server has not joined the network yet")
        return self._peer

    async def start(self) -> None:
        """Join the swarm, choose and load blocks, start serving, and announce it.

        If it fails, everything that was started is stopped again.

        Raises:
            UsageError: the options, the model, the network or the memory do not allow it. The subclass says which:
                `InvalidOption`, `InvalidSpan`, `ModelNotFound`, `CheckpointError`, `UnsupportedModel`,
                `NotEnoughMemory`, `AdapterError`, `PeerUnreachable`, `AddressUnavailable`, `IdentityError`,
                `PointsFileError`.
            DhtError: the DHT, which says where blocks are needed, did not answer.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        """The steps of a start, in their order."""
        options, loop, began = self.config, asyncio.get_running_loop(), time.monotonic()

        def ended(phase: str) -> None:
            self.start_phases[phase] = time.monotonic() - began - sum(self.start_phases.values())

        # 1. Metrics, folders of processes that were killed, and torch's threads.
        if options.metrics is not None:
            self._metrics = MetricsEndpoint(new_registry(), options.metrics)
            self._observer = ServerObserver(self._metrics.registry)
            self._background_tasks.append(loop.create_task(EventLoopMetrics(self._metrics.registry).run()))
        await self._compute_thread.run(remove_abandoned_folders)
        if options.threads is not None:
            await self._compute_thread.run(torch.set_num_threads, options.threads)

        # 2. The model's files, and what follows from them and the options on this machine, which may be measured.
        self._weights = await WeightSource.open(options, self._compute_thread, self._join)
        config = await self._compute_thread.run(resolve_config, options, self._weights.checkpoint)
        checkpoint = config.checkpoint
        ended("the model's files")

        # 3. The network, if the files have not come from there. Other peers may get weights from here.
        self._peer = await self._join()
        identity = options.p2p.identity_path
        self._points = await self._compute_thread.run(
            PointsDesk,
            self._peer.peer_id,
            points_path(identity) if identity is not None else None,
            options.vouchers,
            self._observer,
        )
        self._sharing = WeightSharing(options, checkpoint, lambda: self._is_busy)
        await self._peer.serve_weights(self._sharing.serve)
        self._peer.reach.relay_source = RelayDirectory(self._peer, checkpoint.name, checkpoint.blocks).relays
        logger.info("Peer: %s, listening on %s", self._peer.peer_id, ", ".join(await self._peer.visible_addresses()))

        # 4. Blocks, announced before they are there, so that the next server takes others.
        self.span = await self._choose_span(config)
        announced = ModelInfo(checkpoint.name, checkpoint.blocks, checkpoint.revision)
        self._announcer = Announcer(self._peer, announced, lambda: self._announcement(config), options.update_period)
        self._peer.reach.changed = lambda: self._on_reach_changed(config)
        await self._announcer.announce()
        ended("the network")

        # 5. Their weights.
        await self._weights.require(self.span)
        service = await self._load(config, self.span)
        self._sharing.look_again()
        ended("blocks")

        # 6. Clients.
        await self._peer.serve(self._dispatch)
        await self._announce_ready(config)
        self._announcer.start()
        ended("being known")

        # 7. What goes on in the background: links are measured, idle sessions end, and the server may move.
        async def fetch() -> list[ServerInfo]:
            return await fetch_servers(self.peer.dht, checkpoint.name, checkpoint.blocks)

        async def move(span: Span, closes_gap: bool) -> bool:
            return await self._move(config, span, closes_gap)

        period = options.update_period
        self._links = LinkMeasurement(self.peer, lambda: self.span, fetch, service.model.hidden_size, period)
        self._links.start()
        self._background_tasks.append(loop.create_task(self._expire_sessions()))
        if options.may_move and service.span.length < checkpoint.blocks:
            self._move_loop = MoveLoop(self.peer.peer_id, checkpoint.blocks, fetch, move, period, service.load_seconds)
            self._background_tasks.append(loop.create_task(self._move_loop.run()))

    async def _join(self) -> Peer:
        """This server's place in the network; it is taken once."""
        if self._peer is None:
            self._peer = await join_network(self.config.p2p, AnnouncementValidator())
        return self._peer

    async def _choose_span(self, config: ResolvedConfig) -> Span:
        option, checkpoint, blocks = self.config.blocks, config.checkpoint, config.checkpoint.blocks
        budget = config.budget
        if option.span is not None:
            budget.check_fits(option.span)
            logger.info("Blocks: %s, as asked for", option.span)
            return option.span
        if option.count is not None and option.count > blocks:
            raise InvalidSpan(f"--blocks {option.count}: the model has {blocks} blocks")
        count = option.count or budget.blocks_that_fit()
        if option.count is None:
            logger.info("Memory: %s, enough for %d of %d blocks", budget.memory_text, count, blocks)
        servers = await fetch_servers(self.peer.dht, checkpoint.name, blocks)
        # Until it has measured, it counts as much as the others do. Otherwise the next one would take the same blocks.
        if self.config.throughput is None:
            self._throughput = statistics.median([server.throughput for server in servers] or [self._throughput])
        throughputs = block_throughputs(servers, blocks)
        span = weakest_window(throughputs, count, budget.windows(count))
        budget.check_fits(span)
        weakest = min(throughputs[span.start : span.end])
        reason = "no server has some of them yet" if weakest == 0 else f"their weakest does {weakest:.1f} tokens/s"
        logger.info("Blocks: %s, because %s", span, reason)
        return span

    async def _load(self, config: ResolvedConfig, span: Span) -> SpanService:
        """Load the blocks and accept clients."""
        self._service = await SpanService.load(
            config, span, self.peer, self._compute_thread, self._observer, self._head, self._points
        )
        self._head = self._service.exits.head or self._head
        self._state = ServerState.ONLINE
        return self._service

    async def _announce_ready(self, config: ResolvedConfig) -> None:
        """Announce that clients may come, and say so to those who wait for this server's output."""
        assert self._announcer is not None
        await self.peer.reach.known.wait()
        await self._announcer.announce()
        self._say_whether_ready(config)

    def _on_reach_changed(self, config: ResolvedConfig) -> None:
        """Announce how others reach this server now, or that they cannot."""
        assert self._announcer is not None
        self._announcer.announce_soon()
        if self._said_ready is not None and self.peer.reach.is_reachable is not self._said_ready:
            self._say_whether_ready(config)

    def _say_whether_ready(self, config: ResolvedConfig) -> None:
        self._said_ready = self.peer.reach.is_reachable
        if self._said_ready:
            logger.info("Ready: serving blocks %s of %s", self.span, config.checkpoint.name)
        else:
            reach = self.peer.reach
            advice = reach.advise()
            logger.warning(
                "Not ready, so no client is sent here: this server is %s.%s",
                reach.describe(),
                f" What would help: {advice}" if advice else "",
            )

    async def _dispatch(self, stream: Stream) -> None:
        """Hand a stream to the blocks that are held when it is opened."""
        service = self._service
        if service is None:
            await stream.send(messages.refusal(ServerClosing("this server is moving to other blocks; use another one")))
            return
        await service.handler(stream)

    async def _move(self, config: ResolvedConfig, span: Span, closes_gap: bool) -> bool:
        """Leave the present blocks for those of `span`: finish or hand over the sessions, load, serve again.

        Returns False, and changes nothing, if they do not fit here.
        """
        old = self._service
        assert old is not None
        assert self._announcer is not None
        assert self._weights is not None
        try:
            await self._compute_thread.run(config.budget.check_fits, span)
            await self._weights.require(span)  # while the old blocks go on serving
        except UsageError as error:
            logger.warning("Staying at blocks %s: %s", old.span, error)
            return False
        # From now on others count this server at its new blocks, and no client opens a session here.
        self.span, self._state, self._throughput = span, ServerState.JOINING, old.throughput.current.decode
        await self._announcer.announce()
        # While a gap is open, no session of the swarm gets a token anyway.
        await (old.drain(0.0, LEAVE_HAND_OVER_S) if closes_gap else old.drain(MOVE_FINISH_S))
        self._service = None
        home = old.span
        del old
        gc.unfreeze()  # what was loaded first was taken out of the collector's sight
        gc.collect()
        gc.freeze()
        try:
            await self._load(config, span)
        except Exception:  # loading runs foreign code that may raise anything; the old blocks are known to work
            logger.exception("blocks %s could not be loaded; going back to %s", span, home)
            self.span = home
            await self._load(config, home)
        self._observer.span_moved(closes_gap, arrived=self.span == span)
        if self._sharing is not None:
            self._sharing.look_again()
        await self._announce_ready(config)
        return True

    def _announcement(self, config: ResolvedConfig) -> ServerInfo:
        assert self.span is not None
        reach, state = self.peer.reach, self._state
        if state is ServerState.ONLINE and not reach.is_reachable:
            state = ServerState.JOINING
        service = self._service if state is not ServerState.JOINING else None
        throughput = service.throughput.current.decode if service else self._throughput
        self._observer.throughput_announced(throughput)
        return ServerInfo(
            peer_id=self.peer.peer_id,
            span=self.span,
            state=state,
            throughput=throughput,
            cache_tokens_free=max(0, service.sessions.free) if service else 0,
            revision=config.checkpoint.revision,
            digests=tuple(service.model.digests) if service else (),
            compute_dtype=dtype_name(config.dtype),
            quantization=config.quantization,
            version=VERSION,
            name=self.config.name,
            forward_throughput=service.throughput.current.forward if service else 0.0,
            network_throughput=self._links.network_throughput if self._links else 0.0,
            queue_delay=min(service.engine.queue_seconds, MAX_ANNOUNCED_QUEUE_S) if service else 0.0,
            round_trips=self._links.round_trips if self._links else (),
            mobility=self._move_loop.mobility if self._move_loop else Mobility.PINNED,
            adapters=adapter_names(self.config.adapters) if service else (),
            sparse=service.sparse if service else self._will_be_sparse(config),
            perplexity_loss=service.perplexity_loss if service else None,
            exit_blocks=service.exits.blocks if service else (),
            exit_confidences=service.exits.confidences if service else (),
            shares_weights=self._sharing is not None and self._sharing.is_on,
            relayed_peers=self.config.p2p.relayed_peers if reach.may_relay else 0,
        )

    def _will_be_sparse(self, config: ResolvedConfig) -> bool:
        """Whether the blocks that are loading select neurons, as far as that is known before."""
        assert self.span is not None
        return config.flash is not None and config.flash.footprint.sparse(self.span.start, self.span.end)

    @property
    def _is_busy(self) -> bool:
        return self._service is not None and self._service.engine.is_busy

    async def _expire_sessions(self) -> None:
        while True:
            use = ProcessorUse()
            await asyncio.sleep(EXPIRY_PERIOD_S)
            if self._service is not None:
                self._service.expire()
                with suppress(ServerClosing):
                    await self._service.follow_throughput(use.others())
            if self._points is not None:
                await self._points.save()

    async def lost(self) -> SwarmError:
        """Wait until this server cannot serve any more, and return the reason."""
        cut_off = asyncio.create_task(self.peer.wait_until_cut_off())
        done, _ = await asyncio.wait({cut_off, *self._background_tasks}, return_when=asyncio.FIRST_COMPLETED)
        cut_off.cancel()
        for task in done & set(self._background_tasks):
            error = task.exception()
            return error if isinstance(error, SwarmError) else SwarmError(f"the server broke down: {error!r}")
        return SwarmError(
            "the libp2p daemon of this server has ended, so no peer can reach it any more; start it again"
        )

    async def stop(self) -> None:
        """Announce that this server leaves, hand its sessions over, close everything. Takes a few seconds at most."""
        self._state = ServerState.OFFLINE
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        if self._sharing is not None:
            await self._sharing.close()
        if self._links is not None:
            await self._links.stop()
        if self._announcer is not None:
            await self._announcer.stop()
            try:
                await asyncio.wait_for(self._announcer.announce(), GOODBYE_TIMEOUT_S)
            except (DhtError, TimeoutError) as error:
                logger.debug("could not announce leaving: %r", error)
        if self._service is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._service.drain(0.0, LEAVE_HAND_OVER_S), 2 * LEAVE_HAND_OVER_S)
        if self._points is not None:
            await self._points.close()
        self._compute_thread.close()
        if not await self._compute_thread.wait_ended(LAST_JOB_S):
            logger.debug("the compute thread is still busy")
        if self._metrics is not None:
            self._metrics.close()
        if self._peer is not None:
            await self._peer.shutdown()
