"""What exists while a server holds blocks: model, sessions, engine, handler. Made by `load`, ended by `drain`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from swarm.common.dtypes import dtype_name
from swarm.common.units import format_bytes
from swarm.data_structures import FlashUse, Span
from swarm.metrics.server import ServerObserver
from swarm.models.adapters.adapter_files import read_block_weights
from swarm.models.attention.sequence_states import KEPT_INPUTS
from swarm.models.block_loading import return_freed_memory
from swarm.models.checkpoints.footprint import cache_bytes, state_bytes
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_exit_forwards, choose_forward
from swarm.models.exits.model_head import ModelHead, head_bytes
from swarm.models.exits.span_exits import NOTHING_TRAINED, SpanExits
from swarm.models.loading.flash_loading import load_flash_span
from swarm.models.loading.span_loading import load_span
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine, token_budget
from swarm.server.limits import KEPT_HIDDEN_STATES
from swarm.server.resolved_config import ResolvedConfig
from swarm.server.sessions.adapter_store import AdapterLimits, AdapterStore
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.points_desk import PointsDesk
from swarm.server.sessions.request_validation import RequestLimits
from swarm.server.sessions.session_table import CacheSizes, SessionTable
from swarm.server.throughput.compute_measurement import determine_throughput, measure_throughput
from swarm.server.throughput.throughput_meter import BUSY_SHARE, ThroughputMeter
from swarm.transport.stream import Network

logger = logging.getLogger(__name__)

NO_EXITS = SpanExits(())

HAND_OVER_TIMEOUT_S = 5.0
"""How long clients get to move their sessions to other servers once they were asked to."""

FLASH_ITERATION_TOKENS = 1024
"""Tokens of one iteration of blocks on flash. More than in memory, because each iteration of a prompt reads all weights
once."""

POLL_PERIOD_S = 0.1
"""Time between checks whether all sessions have ended."""


class FlashReporter:
    """Tells an observer what a span has read from flash since the last report; nothing if all is in memory."""

    def __init__(self, model: SpanModel, observer: ServerObserver) -> None:
        self._flash, self._observer = model.flash, observer
        self._reported = FlashUse()

    def report(self) -> None:
        """Tell what is new."""
        if self._flash is not None:
            use = self._flash.use()
            self._observer.flash_used(use.since(self._reported))
            self._reported = use


@dataclass(frozen=True)
class SpanService:
    """Everything that serves one span of blocks.

    Attributes:
        span: the blocks.
        adapters: what clients add to them.
        throughput: what to announce, as far as is known.
        load_seconds: how long loading took.
        flash_reporter: counts what is read from flash.
    """

    span: Span
    model: SpanModel
    sessions: SessionTable
    handler: MessageHandler
    engine: Engine
    adapters: AdapterStore
    throughput: ThroughputMeter
    load_seconds: float
    flash_reporter: FlashReporter

    @classmethod
    async def load(
        cls,
        config: ResolvedConfig,
        span: Span,
        network: Network,
        compute_thread: ComputeThread,
        observer: ServerObserver | None = None,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
        points: PointsDesk | None = None,
    ) -> SpanService:
        """Read the blocks and get ready to serve. Raises what loading raises.

        Args:
            head: of the exits at blocks that were held before (`exits.head`); None to load it if there are exits.
            points: see `MessageHandler`.
        """
        checkpoint, observer = config.checkpoint, observer or ServerObserver()
        # First, because it is quick: an adapter that cannot be used is reported before the weights are read.
        public = [
            await compute_thread.run(read_block_weights, source, checkpoint, span, cache_dir=config.options.cache_dir)
            for source in config.options.adapters
        ]
        # Before the blocks too, because loading takes more memory than is reserved for the head.
        exits = await compute_thread.run(_load_exits, config, span, head)
        began = time.monotonic()
        model = await _load_model(config, span, compute_thread)
        load_seconds = time.monotonic() - began
        logger.info("Loaded: %s of weights in %.1f s", format_bytes(model.weight_bytes), load_seconds)
        model = await _choose_forward(config, model, compute_thread)
        model = await _add_exits(config, model, exits, compute_thread)
        given = config.options.throughput
        measured = await compute_thread.run(determine_throughput, given, model, progress=True)
        throughput = ThroughputMeter(measured, span.length, is_given=given is not None)
        sessions = _make_session_table(config, model, observer)
        logger.info("Attention cache: room for %d tokens", sessions.capacity)
        engine = _make_engine(model, throughput, compute_thread, observer)
        logger.info("Scheduler: up to %d tokens an iteration", engine.budget)
        adapters = AdapterStore(time.monotonic, AdapterLimits(memory=config.adapter_memory), observer)
        if public:
            logger.info("Adapters that every client may use: %s", ", ".join(config.options.adapters))
        for parts in public:
            adapters.add_public(model.adapted.prepare(parts))
        dtype = dtype_name(config.dtype)
        observer.span_loaded(checkpoint.name, checkpoint.revision, dtype, config.quantization, span)
        own = slice(span.start, span.end)
        limits = RequestLimits(
            memory=config.request_memory,
            slot_bytes=max(checkpoint.structure.cached_values[own]) * config.dtype.itemsize,
            sequence_bytes=sum(state_bytes(checkpoint.structure)[own]),
        )
        logger.info("Requests: %s of memory for those on their way", format_bytes(config.request_memory))
        handler = MessageHandler(
            network,
            model,
            checkpoint.revision,
            sessions,
            engine,
            limits,
            adapters=adapters,
            observer=observer,
            quantization=config.quantization,
            points=points,
        )
        reporter = FlashReporter(model, observer)
        return cls(span, model, sessions, handler, engine, adapters, throughput, load_seconds, reporter)

    @property
    def sparse(self) -> bool:
        """Whether tokens are computed with some neurons only."""
        return self.model.flash is not None and self.model.flash.sparse

    @property
    def perplexity_loss(self) -> float | None:
        """How much selecting neurons raises the perplexity; None if all are computed, or if it was not measured."""
        return self.model.flash.perplexity_loss if self.model.flash is not None else None

    @property
    def exits(self) -> SpanExits:
        """Where tokens may leave."""
        return self.model.exits or NO_EXITS

    def expire(self) -> None:
        """Close sessions whose client is gone, drop adapters that have not been used for a while, give pages back, and
        report how blocks on flash do."""
        self.sessions.expire()
        self.adapters.expire()
        if self.model.strategy.paging is not None:
            self.engine.compute_thread.post(self.model.strategy.paging.pool.shrink)
        self.flash_reporter.report()
        self.handler.report()

    async def follow_throughput(self, others: float) -> None:
        """Measure again what other programs have disturbed, and make iterations as large as batches are fast.

        Args:
            others: share of the processors that other programs used in the last seconds.
        """
        engine = self.engine
        if self.throughput.should_repeat and others <= BUSY_SHARE and not engine.is_busy:
            found = await engine.compute_thread.run(measure_throughput, self.model)
            if found.others <= BUSY_SHARE:
                self.throughput.measured_again(found)
        engine.budget = _iteration_tokens(self.model, self.throughput)

    async def drain(self, finish_s: float, hand_over_s: float = HAND_OVER_TIMEOUT_S) -> None:
        """Stop serving: give sessions `finish_s` to end, then `hand_over_s` to move to other servers.

        New sessions are refused at once. In the end nothing more is accepted, and all that was accepted is answered.
        """
        self.handler.closing = True
        if await self._wait_until_empty(finish_s):
            logger.debug("all sessions have ended")
        elif hand_over_s:
            logger.info("Handing over %d sessions to other servers", len(self.sessions))
            await self.handler.hand_over()
            await self._wait_until_empty(hand_over_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.handler.idle(), HAND_OVER_TIMEOUT_S)
        self.handler.hang_up()
        if self.model.flash is not None:
            await self.engine.compute_thread.run(self.model.flash.close)

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until there are no sessions, for `timeout_s` at most. False if there still are some."""
        deadline = time.monotonic() + timeout_s
        while len(self.sessions) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_PERIOD_S)
            self.expire()
        return not len(self.sessions)


def _make_session_table(config: ResolvedConfig, model: SpanModel, observer: ServerObserver) -> SessionTable:
    """A table that counts cache as the model's sequences take it."""
    paging, now = model.strategy.paging, time.monotonic
    if paging is not None:  # a page has room in all blocks, whichever of them a session uses
        return SessionTable(config.cache_tokens, now, page=paging.pool.page_size, observer=observer)
    structure, itemsize, own = (
        config.checkpoint.structure,
        config.dtype.itemsize,
        slice(model.span.start, model.span.end),
    )
    token = tuple(values * itemsize for values in structure.cached_values[own])
    kept = KEPT_HIDDEN_STATES * model.hidden_size * itemsize
    sizes = CacheSizes(
        model.span,
        token,
        state_bytes(structure)[own],
        token_buffer=kept,
        sequence_buffer=KEPT_INPUTS * model.hidden_size * itemsize,
        unit=sum(cache_bytes(structure, config.dtype)[own]) + kept,
    )
    return SessionTable(config.cache_tokens, now, sizes=sizes, observer=observer)


def _make_engine(
    model: SpanModel,
    throughput: ThroughputMeter,
    compute_thread: ComputeThread,
    observer: ServerObserver,
) -> Engine:
    inline = model.flash is None  # the network loop never waits for a drive
    return Engine(compute_thread, _iteration_tokens(model, throughput), observer, inline, throughput)


def _iteration_tokens(model: SpanModel, throughput: ThroughputMeter) -> int:
    if model.flash is not None:
        return FLASH_ITERATION_TOKENS
    return token_budget(throughput.current.forward / model.span.length)


async def _load_model(config: ResolvedConfig, span: Span, compute_thread: ComputeThread) -> SpanModel:
    if config.flash is not None:
        return await compute_thread.run(
            load_flash_span,
            config.checkpoint,
            span,
            dtype=config.dtype,
            options=config.flash.options(span),
            progress=True,
        )
    return await compute_thread.run(
        load_span,
        config.checkpoint,
        span,
        dtype=config.dtype,
        device=config.device,
        quant=config.quantization,
        progress=True,
    )


async def _choose_forward(config: ResolvedConfig, model: SpanModel, compute_thread: ComputeThread) -> SpanModel:
    """The model of the same blocks with the forward that suits this machine."""
    began = time.monotonic()
    if model.strategy.paging is not None:
        # All pages at once: a pool that grows moves, and graphs recorded on it would have to be recorded again.
        await compute_thread.run(model.strategy.paging.pool.reserve, config.cache_tokens)
    chosen = await compute_thread.run(choose_forward, model)
    logger.info("Execution: %s, chosen in %.1f s", chosen.strategy, time.monotonic() - began)
    return chosen


def _load_exits(config: ResolvedConfig, span: Span, head: Callable[[torch.Tensor], torch.Tensor] | None) -> SpanExits:
    """Those that this server was asked to offer, as far as these blocks have them. The head is loaded if it is None."""
    if config.options.exits is None or config.flash is not None:  # blocks on flash cannot be filled
        return NO_EXITS
    blocks, stored = config.options.exits.within(span, config.checkpoint.blocks), config.trained_exits
    if not blocks:
        return NO_EXITS
    trained = stored.load(blocks).to(config.device) if stored is not None else NOTHING_TRAINED
    if head is None:
        head = ModelHead(config.checkpoint, config.dtype, config.device)
    return_freed_memory()
    return SpanExits(blocks, head, trained, head_bytes(config.checkpoint, config.dtype))


async def _add_exits(
    config: ResolvedConfig, model: SpanModel, exits: SpanExits, compute_thread: ComputeThread
) -> SpanModel:
    """The model with these exits, if its blocks can be filled."""
    if config.options.exits is None:
        return model
    if not model.can_fill:
        reason = "of how this family computes attention"
        if model.has_states:
            reason = "each token changes their states"
        elif model.flash is not None:
            reason = "their weights are on flash"
        logger.warning("Exits: none, because tokens have to be computed in full by these blocks: %s", reason)
        return model
    if not exits.blocks:
        logger.info("Exits: none are in blocks %s", model.span)
        return model
    began = time.monotonic()
    with_exits = model.with_exits(exits)
    await compute_thread.run(choose_exit_forwards, with_exits)
    logger.info(
        "Exits: in front of blocks %s by %s, ready in %.1f s",
        ", ".join(map(str, exits.blocks)),
        ", ".join(exits.confidences),
        time.monotonic() - began,
    )
    return with_exits
