"""A server's life: join, choose blocks, load them, serve, move to where it is needed more, leave. The wiring."""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
from contextlib import suppress

import torch

from swarm.common.units import human
from swarm.common.version import VERSION
from swarm.data_structures import Mobility, ModelInfo, ServerInfo, ServerState, Span
from swarm.dht.announcer import Announcer, adapter_names
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import InvalidSpan, ServerClosing, SwarmError
from swarm.metrics.endpoint import MetricsEndpoint
from swarm.metrics.registry import new_registry
from swarm.metrics.server import ServerMetrics, ServerObserver
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.checkpoints.partial_model import resolve_dtype
from swarm.protocol import messages
from swarm.protocol.compression import dtype_name
from swarm.server import memory_budget as memory
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.config import ServerConfig
from swarm.server.limits import DEFAULT_CACHE_TOKENS
from swarm.server.placement import initial_blocks as block_selection
from swarm.server.placement.move_loop import MoveLoop
from swarm.server.span_service import ResolvedConfig, SpanService
from swarm.server.throughput.link_measurement import LinkMeasurement
from swarm.server.throughput.measurement import remembered_throughput
from swarm.transport.joining import join_network
from swarm.transport.p2p import Peer
from swarm.transport.stream import Stream

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 1.5
"""Seconds that a leaving server gives to the clients whose sessions it hands over."""

FINISH_TIMEOUT_S = 60.0
"""Seconds that a moving server gives its sessions to end before it hands them over."""

EXPIRY_PERIOD_S = 5.0
"""Seconds between looks for sessions whose client is gone, and for adapters that nobody uses."""


class Server:
    """One server. `start` returns when it serves; `stop` takes it out of the swarm.

    Everything lives in the running asyncio loop and one compute thread, so several servers can share a process.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.span: Span | None = None
        self._runtime = ComputeThread()
        self._state = ServerState.JOINING
        self._serving: SpanService | None = None
        self._throughput = config.throughput.rate or 1.0
        """Blocks x tokens per second; while it loads, what it did at its former blocks, if there were any."""
        self._peer: Peer | None = None
        self._announcer: Announcer | None = None
        self._neighbours: LinkMeasurement | None = None
        self._rebalancer: MoveLoop | None = None
        self._background: list[asyncio.Task[None]] = []
        self._observer = ServerObserver()
        self._metrics: MetricsEndpoint | None = None

    @property
    def metrics_url(self) -> str:
        """Where Prometheus may ask; empty for nowhere."""
        return self._metrics.url if self._metrics is not None else ""

    @property
    def peer(self) -> Peer:
        """This server's place in the network, after `start`."""
        if self._peer is None:
            raise SwarmError("the server has not joined the network yet")
        return self._peer

    @property
    def _stays(self) -> bool:
        """Whoever names the blocks wants these and no others."""
        return self.config.stay or self.config.blocks.span is not None

    async def start(self) -> None:
        """Join the swarm, choose and load blocks, begin to serve.

        Raises `UsageError` of the fitting kind; whatever had been started is stopped again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def lost(self) -> SwarmError:
        """Return when this server cannot serve any more, and why."""
        cut_off = asyncio.create_task(self.peer.lost())
        done, _ = await asyncio.wait({cut_off, *self._background}, return_when=asyncio.FIRST_COMPLETED)
        cut_off.cancel()
        for task in done & set(self._background):
            error = task.exception()
            return error if isinstance(error, SwarmError) else SwarmError(f"the server broke down: {error!r}")
        return SwarmError(
            "the libp2p daemon of this server has ended, so nobody could reach it any more; start it again"
        )

    async def _start(self) -> None:
        config = self.config
        if config.metrics is not None:
            self._metrics = MetricsEndpoint(new_registry(), config.metrics)
            self._observer = ServerMetrics(self._metrics.registry)
        checkpoint = await self._runtime.run(
            open_checkpoint, config.model, revision=config.revision, cache_dir=config.cache_dir
        )
        device, dtype = memory.resolve_device(config.device), resolve_dtype(config.dtype, checkpoint.config)
        cache_tokens, wanted = config.cache_tokens or DEFAULT_CACHE_TOKENS, config.blocks.span or config.blocks.count
        reserved = config.adapter_memory or 0
        plan = ResolvedConfig(
            checkpoint=checkpoint,
            device=device,
            dtype=dtype,
            cache_tokens=cache_tokens,
            throughput=config.throughput,
            throughput_cache=config.throughput_cache,
            compile_in=config.compile_in,
            quant=await self._runtime.run(
                memory.resolve_quantization, config.quant, checkpoint, device, dtype, wanted, cache_tokens, reserved
            ),
            adapters=config.adapters,
            adapter_memory=memory.adapter_memory(config.adapter_memory, memory.free_memory(device)),
            cache_dir=config.cache_dir,
        )
        logger.info("Model: %s, revision %s, %d blocks", checkpoint.name, checkpoint.revision, checkpoint.blocks)
        logger.info("Device: %s, computing in %s", plan.device, dtype_name(plan.dtype))
        if config.blocks.span is not None:
            checkpoint.check_span(config.blocks.span.start, config.blocks.span.end)
        if config.threads is not None:
            await self._runtime.run(torch.set_num_threads, config.threads)

        self._peer = await join_network(config.p2p, AnnouncementValidator())
        logger.info("Peer: %s, listening on %s", self._peer.peer_id, ", ".join(await self._peer.visible_addresses()))
        self.span = await self._choose_span(plan)
        self._throughput = await self._expected_throughput(plan, self.span)
        announced = ModelInfo(checkpoint.name, checkpoint.blocks, checkpoint.revision)
        self._announcer = Announcer(self._peer, announced, lambda: self._describe(plan), config.update_period)
        await self._announcer.announce()  # as joining, so that the next server takes other blocks
        await self._serve(plan, self.span)
        await self._peer.serve(self._dispatch)
        self._announcer.start()
        self._start_background(plan)

    def _start_background(self, plan: ResolvedConfig) -> None:
        loop = asyncio.get_running_loop()
        period = self.config.update_period
        checkpoint = plan.checkpoint

        async def view() -> list[ServerInfo]:
            return await fetch_servers(self.peer.dht, checkpoint.name, checkpoint.blocks)

        assert self._serving is not None
        hidden_size = self._serving.model.hidden_size
        self._neighbours = LinkMeasurement(self.peer, lambda: self.span, view, hidden_size, period)
        self._neighbours.start()
        self._background.append(loop.create_task(self._expire_sessions()))
        if not self._stays and self._serving.span.length < checkpoint.blocks:

            async def move(span: Span, urgent: bool) -> None:
                await self._move(plan, span, urgent)

            load_seconds = self._serving.load_seconds
            self._rebalancer = MoveLoop(self.peer.peer_id, checkpoint.blocks, view, move, period, load_seconds)
            self._background.append(loop.create_task(self._rebalancer.run()))

    async def _choose_span(self, plan: ResolvedConfig) -> Span:
        wanted, checkpoint, blocks = self.config.blocks, plan.checkpoint, plan.checkpoint.blocks
        needs = await self._runtime.run(memory_footprint, checkpoint, plan.dtype, plan.quant)
        free = memory.free_memory(plan.device) - (self.config.adapter_memory or 0)
        if wanted.span is not None:
            memory.check_fits(needs, wanted.span.start, wanted.span.end, free, plan.cache_tokens)
            logger.info("Blocks: %s, as asked for", wanted.span)
            return wanted.span
        if wanted.count is not None and wanted.count > blocks:
            raise InvalidSpan(f"--blocks {wanted.count}: the model has {blocks} blocks")
        count = wanted.count or memory.blocks_that_fit(needs, free, plan.cache_tokens)
        if wanted.count is None:
            logger.info("Memory: %s free, enough for %d of %d blocks", human(free), count, blocks)
        servers = await fetch_servers(self.peer.dht, checkpoint.name, blocks)
        # Until it has measured, it counts as much as the others do: else the next one would take the same blocks.
        self._throughput = statistics.median([server.throughput for server in servers] or [self._throughput])
        throughputs = block_selection.block_throughputs(servers, blocks)
        span = block_selection.weakest_window(throughputs, count)
        memory.check_fits(needs, span.start, span.end, free, plan.cache_tokens)
        weakest = min(throughputs[span.start : span.end])
        reason = "nobody serves some of them yet" if weakest == 0 else f"their weakest does {weakest:.1f} tokens/s"
        logger.info("Blocks: %s, because %s", span, reason)
        return span

    async def _expected_throughput(self, plan: ResolvedConfig, span: Span) -> float:
        """What to announce while the blocks are loading."""
        if self.config.throughput.rate is not None:
            return self.config.throughput.rate
        name, revision = plan.checkpoint.name, plan.checkpoint.revision
        known = await self._runtime.run(
            remembered_throughput, span, plan.device, plan.dtype, name, revision, plan.quant, plan.throughput_cache
        )
        return known.decode if known is not None else self._throughput

    async def _serve(self, plan: ResolvedConfig, span: Span) -> None:
        """Load the blocks and be ready for clients."""
        self._serving = await SpanService.load(plan, span, self.peer, self._runtime, self._observer)
        self._throughput = self._serving.throughput.decode
        self._state = ServerState.ONLINE

    async def _dispatch(self, stream: Stream) -> None:
        """Every stream goes to the blocks that are held when it comes."""
        serving = self._serving
        if serving is None:
            await stream.send(messages.refusal(ServerClosing("this server is moving to other blocks; use another one")))
            return
        await serving.handler(stream)

    async def _move(self, plan: ResolvedConfig, span: Span, urgent: bool) -> None:
        """Leave the blocks held now for those of `span`: finish or hand over the sessions, load, serve again."""
        old = self._serving
        assert old is not None
        assert self._announcer is not None
        # From now on others count this server at its new blocks, and no client begins a session here.
        self.span, self._state = span, ServerState.JOINING
        await self._announcer.announce()
        # While a gap is open nobody gets a token anyway.
        await (old.drain(0.0, LEAVE_TIMEOUT_S) if urgent else old.drain(FINISH_TIMEOUT_S))
        self._serving = None
        home = old.span
        del old
        gc.unfreeze()  # what was loaded first was taken out of the collector's sight
        gc.collect()
        try:
            await self._serve(plan, span)
        except Exception:
            logger.exception("blocks %s could not be loaded; going back to %s", span, home)
            self.span = home
            await self._serve(plan, home)
        self._observer.moved(urgent, arrived=self.span == span)
        await self._announcer.announce()

    def _describe(self, plan: ResolvedConfig) -> ServerInfo:
        assert self.span is not None
        serving = self._serving if self._state is not ServerState.JOINING else None
        return ServerInfo(
            peer_id=self.peer.peer_id,
            span=self.span,
            state=self._state,
            throughput=self._throughput,
            cache_tokens_free=max(0, serving.sessions.free) if serving else 0,
            revision=plan.checkpoint.revision,
            digests=tuple(serving.model.digests) if serving else (),
            compute_dtype=dtype_name(plan.dtype),
            quantization=plan.quant,
            version=VERSION,
            name=self.config.name,
            forward_throughput=serving.throughput.forward if serving else 0.0,
            network_throughput=self._neighbours.network_throughput if self._neighbours else 0.0,
            queue_delay=min(serving.engine.queue_seconds, 3600.0) if serving else 0.0,
            round_trips=self._neighbours.round_trips if self._neighbours else (),
            mobility=self._rebalancer.mobility if self._rebalancer else Mobility.PINNED,
            adapters=adapter_names(self.config.adapters) if serving else (),
        )

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            if self._serving is not None:
                self._serving.expire()

    async def stop(self) -> None:
        """Announce that this server leaves, hand its sessions over, close everything. Takes a few seconds at most."""
        self._state = ServerState.OFFLINE
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._neighbours is not None:
            await self._neighbours.stop()
        if self._announcer is not None:
            await self._announcer.stop()
            try:
                await asyncio.wait_for(self._announcer.announce(), 1.0)
            except Exception as error:  # the swarm may be gone; leaving goes on
                logger.debug("could not announce leaving: %r", error)
        if self._serving is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving.drain(0.0, LEAVE_TIMEOUT_S), 2 * LEAVE_TIMEOUT_S)
        self._runtime.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._peer is not None:
            await self._peer.shutdown()
