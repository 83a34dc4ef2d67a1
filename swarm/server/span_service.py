"""What exists while a server holds blocks: model, sessions, handler. Made by `load`, ended by `drain`."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.common.units import human
from swarm.data_structures import Span
from swarm.metrics.server import ServerObserver
from swarm.models.adapters.adapter_files import read_parts
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import try_capture
from swarm.models.span_loading import load_span
from swarm.protocol.compression import dtype_name
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine, token_budget
from swarm.server.limits import MAX_DEFAULT_ADAPTER_BYTES
from swarm.server.sessions.adapter_store import AdapterLimits, AdapterStore
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from swarm.server.throughput.measurement import determine_throughput
from swarm.server.throughput.throughput_cache import Throughput
from swarm.server.throughput.throughput_option import ThroughputOption
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)

HAND_OVER_TIMEOUT_S = 5.0
"""Seconds that clients get to move their sessions to other servers once they were told to."""

POLL_PERIOD_S = 0.1


@dataclass(frozen=True)
class ResolvedConfig:
    """What to load, and how.

    Attributes:
        checkpoint: the model.
        device, dtype: to compute on and in.
        cache_tokens: room in the attention cache.
        throughput: where the throughput comes from.
        throughput_cache: file of results measured before; None for none.
        compile_in: folder of compiled code; None not to compile.
        quant: form of the weights, see `swarm.models.weights.quantization`.
        adapters: folders or hub ids of adapters that every client may use.
        adapter_memory: bytes of clients' adapters.
        cache_dir: where files from the hub are kept; None for the hub's own place.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    cache_tokens: int
    throughput: ThroughputOption
    throughput_cache: Path | None
    compile_in: Path | None = None
    quant: str = "none"
    adapters: tuple[str, ...] = ()
    adapter_memory: int = MAX_DEFAULT_ADAPTER_BYTES
    cache_dir: Path | None = None


@dataclass(frozen=True)
class SpanService:
    """Attributes:
    span: the blocks.
    adapters: what clients add to them.
    load_seconds: how long it took to load them.
    """

    span: Span
    model: SpanModel
    sessions: SessionTable
    handler: MessageHandler
    engine: Engine
    adapters: AdapterStore
    throughput: Throughput
    load_seconds: float

    @classmethod
    async def load(
        cls,
        plan: ResolvedConfig,
        span: Span,
        network: Network,
        runtime: ComputeThread,
        observer: ServerObserver | None = None,
    ) -> SpanService:
        """Read the blocks and get ready. Raises what loading raises."""
        checkpoint, observer = plan.checkpoint, observer or ServerObserver()
        # First, because it is quick: what cannot be used is told before the weights are read.
        public = [
            await runtime.run(read_parts, source, checkpoint, span, cache_dir=plan.cache_dir)
            for source in plan.adapters
        ]
        began = time.monotonic()
        model = await runtime.run(
            load_span, checkpoint, span, dtype=plan.dtype, device=plan.device, quant=plan.quant, progress=True
        )
        seconds = time.monotonic() - began
        logger.info("Loaded: %s of weights in %.1f s", human(model.weight_bytes), seconds)
        began = time.monotonic()
        if plan.compile_in is not None:
            logger.info("Compiling, unless it was done before: about half a minute")
        page = 1
        if model.paging is not None:
            page = model.paging.pool.page_size
            # All at once: a pool that grows moves, and what was recorded of it has to be recorded again.
            await runtime.run(model.paging.pool.reserve, plan.cache_tokens)
        way = await runtime.run(try_capture, model, plan.compile_in)
        logger.info("Forward: %s, after %.1f s", way, time.monotonic() - began)
        throughput = await runtime.run(
            determine_throughput,
            plan.throughput,
            model,
            checkpoint.name,
            checkpoint.revision,
            plan.quant,
            plan.throughput_cache,
            True,
        )
        sessions = SessionTable(plan.cache_tokens, time.monotonic, page=page, observer=observer)
        logger.info("Attention cache: room for %d tokens", sessions.capacity)
        engine = Engine(runtime, token_budget(throughput.forward / span.length), observer)
        logger.info("Scheduler: up to %d tokens an iteration", engine.budget)
        adapters = AdapterStore(time.monotonic, AdapterLimits(memory=plan.adapter_memory), observer)
        if public:
            logger.info("Adapters that every client may use: %s", ", ".join(plan.adapters))
        for parts in public:
            adapters.add_public(model.adapted.prepare(parts))
        observer.serving(
            checkpoint.name, checkpoint.revision, dtype_name(plan.dtype), plan.quant, span, throughput.decode
        )
        handler = MessageHandler(
            network, model, checkpoint.revision, sessions, engine, adapters=adapters, observer=observer
        )
        return cls(span, model, sessions, handler, engine, adapters, throughput, seconds)

    def expire(self) -> None:
        """Close sessions whose client is gone, and let go adapters that nobody uses."""
        self.sessions.expire()
        self.adapters.expire()

    async def drain(self, finish: float, hand_over: float = HAND_OVER_TIMEOUT_S) -> None:
        """Stop serving: give sessions `finish` seconds to end, then `hand_over` seconds to move elsewhere.

        New sessions are refused at once. In the end nothing is accepted any more, and what was is answered.
        """
        self.handler.closing = True
        if await self._empty(finish):
            logger.debug("all sessions have ended")
        elif hand_over:
            logger.info("Handing over %d sessions to other servers", len(self.sessions))
            await self.handler.hand_over()
            await self._empty(hand_over)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.handler.idle(), HAND_OVER_TIMEOUT_S)
        self.handler.hang_up()

    async def _empty(self, patience: float) -> bool:
        """Wait until there are no sessions, for `patience` seconds at most."""
        deadline = time.monotonic() + patience
        while len(self.sessions) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_PERIOD_S)
            self.expire()
        return not len(self.sessions)
