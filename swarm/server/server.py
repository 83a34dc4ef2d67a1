"""A server's life: join, choose blocks, load them, serve, leave. The wiring of all rooms of a server."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.dht.announcer import Announcer
from swarm.dht.directory import fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import InvalidSpan, SwarmError
from swarm.models.checkpoint import Checkpoint, open_checkpoint
from swarm.models.footprint import footprint
from swarm.models.loading import resolve_dtype
from swarm.models.span import SpanModel, load_span
from swarm.protocol.compression import dtype_name
from swarm.server import block_selection, memory
from swarm.server.config import CACHE_TOKENS, ServerConfig
from swarm.server.handler import Handler
from swarm.server.memory import human
from swarm.server.runtime import Runtime
from swarm.server.sessions import Sessions
from swarm.server.throughput import measure_throughput
from swarm.transport.p2p import Peer
from swarm.version import VERSION

logger = logging.getLogger(__name__)

DRAIN = 2.5
"""Seconds that a leaving server gives to the steps that are running."""


@dataclass
class _Serving:
    """What exists once the blocks are loaded."""

    model: SpanModel
    sessions: Sessions
    handler: Handler
    throughput: float


class Server:
    """One server. `start` returns when it serves; `stop` takes it out of the swarm.

    Everything lives in the running asyncio loop and one compute thread, so several servers can share a process.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.span: Span | None = None
        self._runtime = Runtime()
        self._state = ServerState.JOINING
        self._serving: _Serving | None = None
        self._peer: Peer | None = None
        self._announcer: Announcer | None = None
        self._housekeeping: asyncio.Task[None] | None = None

    @property
    def peer(self) -> Peer:
        """This server's place in the network, after `start`."""
        if self._peer is None:
            raise SwarmError("the server has not joined the network yet")
        return self._peer

    async def start(self) -> None:
        """Join the swarm, choose and load blocks, begin to serve.

        Raises `UsageError` of the fitting kind; whatever had been started is stopped again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        checkpoint = await self._runtime.run(
            open_checkpoint, config.model, revision=config.revision, cache_dir=config.cache_dir
        )
        device = memory.resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, checkpoint.config)
        blocks = checkpoint.blocks
        logger.info("Model: %s, revision %s, %d blocks", checkpoint.name, checkpoint.revision, blocks)
        logger.info("Device: %s, computing in %s", device, dtype_name(dtype))
        if config.blocks.span is not None:
            checkpoint.check_span(config.blocks.span.start, config.blocks.span.end)

        self._peer = await Peer.create(config.p2p, AnnouncementValidator())
        logger.info("Peer: %s, listening on %s", self._peer.peer_id, ", ".join(await self._peer.visible_addresses()))
        self.span = await self._choose_span(checkpoint, blocks, device, dtype)
        self._announcer = Announcer(
            self._peer, checkpoint.name, lambda: self._describe(checkpoint, dtype), config.update_period
        )
        await self._announcer.announce()  # as joining, so that the next server takes other blocks
        await self._load(checkpoint, self.span, device, dtype)
        self._state = ServerState.ONLINE
        self._announcer.start()
        self._housekeeping = asyncio.get_running_loop().create_task(self._expire_sessions())

    async def _choose_span(self, checkpoint: Checkpoint, blocks: int, device: torch.device, dtype: torch.dtype) -> Span:
        wanted = self.config.blocks
        needs = await self._runtime.run(footprint, checkpoint, dtype)
        free = memory.free_memory(device)
        tokens = self._cache_tokens
        if wanted.span is not None:
            memory.check_fits(needs, wanted.span.start, wanted.span.end, free, tokens)
            logger.info("Blocks: %s, as asked for", wanted.span)
            return wanted.span
        if wanted.count is not None and wanted.count > blocks:
            raise InvalidSpan(f"--blocks {wanted.count}: the model has {blocks} blocks")
        count = wanted.count or memory.blocks_that_fit(needs, free, tokens)
        if wanted.count is None:
            logger.info("Memory: %s free, enough for %d of %d blocks", human(free), count, blocks)
        servers = await fetch_servers(self.peer.dht, checkpoint.name, blocks)
        throughputs = block_selection.block_throughputs(servers, blocks)
        span = block_selection.weakest_window(throughputs, count)
        memory.check_fits(needs, span.start, span.end, free, tokens)
        weakest = min(throughputs[span.start : span.end])
        reason = "nobody serves some of them yet" if weakest == 0 else f"their weakest does {weakest:.1f} tokens/s"
        logger.info("Blocks: %s, because %s", span, reason)
        return span

    async def _load(self, checkpoint: Checkpoint, span: Span, device: torch.device, dtype: torch.dtype) -> None:
        if self.config.threads is not None:
            await self._runtime.run(torch.set_num_threads, self.config.threads)
        began = time.monotonic()
        model = await self._runtime.run(load_span, checkpoint, span, dtype=dtype, device=device, progress=True)
        logger.info("Loaded: %s of weights in %.1f s", human(model.weight_bytes), time.monotonic() - began)
        throughput = self.config.throughput
        if throughput is None:
            throughput = await self._runtime.run(measure_throughput, model)
            logger.info("Throughput: %.0f blocks/s, measured (%.0f tokens/s)", throughput, throughput / span.length)
        else:
            logger.info("Throughput: %.0f blocks/s, as given", throughput)
        sessions = Sessions(self._cache_tokens, time.monotonic)
        logger.info("Attention cache: room for %d tokens", sessions.capacity)
        handler = Handler(model, checkpoint.revision, sessions, self._runtime)
        self._serving = _Serving(model, sessions, handler, throughput)
        await self.peer.serve(handler)

    @property
    def _cache_tokens(self) -> int:
        return self.config.cache_tokens or CACHE_TOKENS

    def _describe(self, checkpoint: Checkpoint, dtype: torch.dtype) -> ServerInfo:
        assert self.span is not None
        serving = self._serving
        return ServerInfo(
            peer_id=self.peer.peer_id,
            span=self.span,
            state=self._state,
            throughput=serving.throughput if serving else self.config.throughput or 1.0,
            cache_tokens_free=max(0, serving.sessions.free) if serving else 0,
            revision=checkpoint.revision,
            digests=tuple(serving.model.digests) if serving else (),
            compute_dtype=dtype_name(dtype),
            quantization="none",
            version=VERSION,
            name=self.config.name,
        )

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(5)
            if self._serving is not None:
                self._serving.sessions.expire()

    async def stop(self) -> None:
        """Announce that this server leaves, finish the running steps, close everything. Takes a few seconds at most."""
        self._state = ServerState.OFFLINE
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self._announcer is not None:
            await self._announcer.stop()
            try:
                await asyncio.wait_for(self._announcer.announce(), 1.0)
            except Exception as error:  # the swarm may be gone; leaving goes on
                logger.debug("could not announce leaving: %r", error)
        if self._serving is not None:
            self._serving.handler.closing = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving.handler.idle(), DRAIN)
        self._runtime.close()
        if self._peer is not None:
            await self._peer.shutdown()
