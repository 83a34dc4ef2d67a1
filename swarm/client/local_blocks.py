"""The first blocks, computed by this client itself: it is the starter of the ring (MDI-LLM, section III-A).

What stands here is a small server without a network: the same span, the same cache, the same layouts, so everything
that a session does to its rows (padding, rollback, beam search) happens here as it does behind.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from swarm.client.chain.input_history import REQUEST_TOKENS
from swarm.client.wire.padding import PaddedBatch, drop_padding, restore_padding
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import InvalidSpan, TooLong
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution.gradients import forward_with_graph
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel


def parse_local_blocks(wanted: Any, blocks: int) -> Span | None:
    """Which blocks are computed here.

    Args:
        wanted: a number of blocks, "START:END", anything with `start` and `end` (or `stop`), or None.
        blocks: of the whole model.

    Raises:
        InvalidSpan: they do not begin with the first block, or leave none to the swarm.
    """
    if wanted is None or (wanted == 0 and not isinstance(wanted, str)):
        return None
    try:
        start, end = _edges(wanted)
    except (TypeError, ValueError, AttributeError):
        raise InvalidSpan(f'local_blocks={wanted!r}: use a number of blocks, or a range such as "0:4"') from None
    if start != 0:
        raise InvalidSpan(f"local_blocks={start}:{end}: what is computed here begins with block 0, as in 0:{end}")
    if end >= blocks:
        raise InvalidSpan(
            f"local_blocks={start}:{end} leaves nothing to the swarm, the model has {blocks} blocks: keep fewer here, "
            "or use transformers without a swarm"
        )
    return Span(start, end)


def _edges(wanted: Any) -> tuple[int, int]:
    if isinstance(wanted, str):
        start, separator, end = wanted.partition(":")
        return (int(start), int(end)) if separator else (0, int(wanted))
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return 0, wanted
    end = wanted.end if hasattr(wanted, "end") else wanted.stop
    return int(wanted.start or 0), int(end)


def describe_route(route: Route, local: Span | None) -> str:
    """The whole way of a token, for people."""
    return str(route) if local is None else f"route: {local} here → " + str(route).removeprefix("route: ")


class LocalBlocks:
    """The blocks of one client; sessions share their weights. One step at a time is computed.

    Args:
        model: they begin with block 0.
    """

    def __init__(self, model: SpanModel) -> None:
        self.span = model.span
        self._model = model
        self._lock = threading.Lock()

    def session(self, adapter: AdapterWeights = NO_ADAPTER) -> LocalSession:
        """Caches for one session, with an adapter as for `new_cache`."""
        return LocalSession(self, adapter)

    def new_cache(self, span: Span, adapter: AdapterWeights = NO_ADAPTER) -> SessionCache:
        """An empty cache for some of the blocks.

        Args:
            adapter: what is added to blocks, also to those of others. Raises `AdapterRefused` if it does not fit.
        """
        return SessionCache(self._model.narrowed(span), self._checked(span, adapter))

    def forward(
        self, span: Span, hidden_RTH: torch.Tensor, rows: PaddedBatch, adapter: AdapterWeights = NO_ADAPTER
    ) -> torch.Tensor:
        """Run whole sequences through the blocks of `span`, with torch's own graph behind them if gradients are wanted.

        Args:
            adapter: as for `new_cache`.

        Returns and raises as `compute`.
        """
        size = max(1, REQUEST_TOKENS // max(1, hidden_RTH.shape[1]))
        pieces = [slice(first, first + size) for first in range(0, max(1, len(hidden_RTH)), size)]
        return torch.cat([self._forward(span, hidden_RTH[piece], rows[piece], adapter) for piece in pieces])

    def _forward(
        self, span: Span, hidden_RTH: torch.Tensor, rows: PaddedBatch, adapter: AdapterWeights
    ) -> torch.Tensor:
        layout = rows.layout
        if not layout.tokens:
            return torch.zeros_like(hidden_RTH)
        tensors = [hidden_RTH, *(tensor for part in adapter.values() for tensor in part.tensors)]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return self.compute(self.new_cache(span, adapter), hidden_RTH, rows.real, layout)
        self._check_positions(layout)
        model = self._model.narrowed(span)
        packed_TH = drop_padding(hidden_RTH, rows.real).to(model.device, model.dtype)
        with self._lock:
            output_TH = forward_with_graph(model, packed_TH, layout, self._checked(span, adapter))
        return restore_padding(output_TH, hidden_RTH, rows.real)

    def _checked(self, span: Span, adapter: AdapterWeights) -> AdapterWeights:
        mine = {block: part for block, part in adapter.items() if block in span}
        for block, part in mine.items():
            self._model.adapted.validate(block, part)
        return mine

    def compute(
        self, cache: SessionCache, hidden_RTH: torch.Tensor, real_RT: torch.Tensor | None, layout: StepLayout
    ) -> torch.Tensor:
        """One step of `cache`.

        Args:
            hidden_RTH: the rows' new slots.
            real_RT: which of them are no padding; None if all are.
            layout: of the real ones.

        Returns:
            outputs of the same shape; zero where padded.

        Raises:
            TooLong: the model has no such position.
        """
        self._check_positions(layout)
        packed_TH = drop_padding(hidden_RTH, real_RT).to(self._model.device, self._model.dtype)
        with self._lock:
            output_TH = cache.step(packed_TH.contiguous(), layout)
        return restore_padding(output_TH, hidden_RTH, real_RT)

    def _check_positions(self, layout: StepLayout) -> None:
        limit = self._model.positions
        if limit is None:
            return
        offsets = layout.offsets or (0,) * layout.sequences
        ends = [
            start + offset + count for start, offset, count in zip(layout.starts, offsets, layout.counts, strict=True)
        ]
        if max(ends) > limit:
            raise TooLong(f"row {ends.index(max(ends))} reaches position {max(ends)}; this model has {limit} positions")


class LocalSession:
    """One session's caches for the local blocks, and how they stay in step with those behind.

    Local blocks have computed a step before it is sent. If it fails behind and comes again, its tokens are simply
    computed again (a start below what is cached is a rollback), but its rows must not be copied about again.
    """

    def __init__(self, blocks: LocalBlocks, adapter: AdapterWeights = NO_ADAPTER) -> None:
        self._blocks = blocks
        self._cache = blocks.new_cache(blocks.span, adapter)
        self._copied: tuple[int, ...] | None = None
        """Where the rows were copied from, in steps that have not come to their end."""
        self.timing: HopTiming | None = None
        """Of the last step."""

    def compute(self, hidden_RTH: torch.Tensor, real_RT: torch.Tensor | None, layout: StepLayout) -> torch.Tensor:
        """What the blocks behind are sent, for a step's new slots.

        Args:
            real_RT: which of them are no padding; None if all are.
            layout: as it is going to be sent.
        """
        began = time.perf_counter()
        sources = local_sources(layout.sources, self._copied)
        here = StepLayout(layout.starts, layout.counts, sources, layout.offsets)
        output = self._blocks.compute(self._cache, hidden_RTH, real_RT, here)
        if layout.sources is not None:
            self._copied = layout.sources
        seconds = time.perf_counter() - began
        self.timing = HopTiming(seconds, seconds)
        return output

    def confirm(self) -> None:
        """What was computed here has been computed behind, too."""
        self._copied = None


def local_sources(sources: tuple[int, ...] | None, copied: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Where rows come from in a cache whose rows were copied already.

    Args:
        sources: where they come from in caches that know nothing of `copied`.
        copied: what was done here in a step that failed behind. The step that comes now has the same sources, or some
            of them: a step that failed leaves what is to be copied as it was, and more may be selected from that.
    """
    if sources is None or copied is None:
        return sources
    return tuple(copied.index(source) for source in sources)
