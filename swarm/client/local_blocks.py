"""The first blocks, if the client computes them itself: it is the starter of the ring (MDI-LLM, section III-A).

They work like a small server without a network: the same span, cache and layouts. So everything that a session does to
its sequences (padding, rollback, beam search) works in the local blocks as it does at servers.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch

from swarm.client.wire.packed_hidden import MAX_REQUEST_TOKENS, PaddedBatch, drop_padding, restore_padding
from swarm.data_structures import HopTiming, Route, Span, StepLayout
from swarm.errors import InvalidSpan, TooLong
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution.gradients import forward_with_graph
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel

LocalBlocksOption = int | str | Span | None
"""How a caller says which blocks the client computes itself."""


def parse_local_blocks(value: Any, blocks: int) -> Span | None:
    """The blocks that the client computes itself.

    Args:
        value: a number of blocks, "START:END", an object with `start` and `end` (or `stop`), or None.
        blocks: number of blocks of the whole model.

    Raises:
        InvalidSpan: the blocks do not begin with the first block, or leave none to the swarm.
    """
    if value is None or (value == 0 and not isinstance(value, str)):
        return None
    try:
        start, end = _parse_ends(value)
    except (TypeError, ValueError, AttributeError):
        raise InvalidSpan(f'local_blocks={value!r}: use a number of blocks, or a range such as "0:4"') from None
    if start != 0:
        raise InvalidSpan(f"local_blocks={start}:{end}: local blocks have to begin with block 0, as in 0:{end}")
    if end >= blocks:
        raise InvalidSpan(
            f"local_blocks={start}:{end} leaves nothing to the swarm, because the model has {blocks} blocks: keep "
            "fewer blocks local, or use transformers without a swarm"
        )
    return Span(start, end)


def _parse_ends(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        start, separator, end = value.partition(":")
        return (int(start), int(end)) if separator else (0, int(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return 0, value
    end = value.end if hasattr(value, "end") else value.stop
    return int(value.start or 0), int(end)


def describe_route(route: Route, local: Span | None) -> str:
    """The whole route of a token, with the local blocks, for display."""
    return str(route) if local is None else f"route: {local} here → " + str(route).removeprefix("route: ")


class LocalBlocks:
    """The local blocks of one client. Sessions share the weights; one step is computed at a time.

    Args:
        model: the blocks, from block 0 on.
    """

    def __init__(self, model: SpanModel) -> None:
        self.span = model.span
        self._model = model
        self._lock = threading.Lock()

    def session(self, adapter: AdapterWeights = NO_ADAPTER) -> LocalSession:
        """The local side of a new session, with an adapter as for `new_cache`."""
        return LocalSession(self, adapter)

    def new_cache(self, span: Span, adapter: AdapterWeights = NO_ADAPTER) -> SessionCache:
        """An empty cache for the blocks of `span`.

        Args:
            adapter: what is added to blocks; parts of other blocks are ignored.

        Raises:
            AdapterRefused: the adapter does not fit the blocks.
        """
        return SessionCache(self._model.narrowed(span), self._fitting_parts(span, adapter))

    def forward(
        self, span: Span, hidden_RTH: torch.Tensor, batch: PaddedBatch, adapter: AdapterWeights = NO_ADAPTER
    ) -> torch.Tensor:
        """Run whole sequences through the blocks of `span`, with a graph of torch if gradients are needed.

        Args:
            adapter: as for `new_cache`.

        Returns and raises as `compute`.
        """
        size = max(1, MAX_REQUEST_TOKENS // max(1, hidden_RTH.shape[1]))
        pieces = [slice(first, first + size) for first in range(0, max(1, len(hidden_RTH)), size)]
        return torch.cat([self._forward(span, hidden_RTH[piece], batch[piece], adapter) for piece in pieces])

    def _forward(
        self, span: Span, hidden_RTH: torch.Tensor, batch: PaddedBatch, adapter: AdapterWeights
    ) -> torch.Tensor:
        layout = batch.layout
        if not layout.tokens:
            return torch.zeros_like(hidden_RTH)
        tensors = [hidden_RTH, *(tensor for part in adapter.values() for tensor in part.tensors)]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return self.compute(self.new_cache(span, adapter), hidden_RTH, batch.real, layout)
        self._require_positions(layout)
        model = self._model.narrowed(span)
        packed_TH = drop_padding(hidden_RTH, batch.real).to(model.device, model.dtype)
        with self._lock:
            output_TH = forward_with_graph(model, packed_TH, layout, self._fitting_parts(span, adapter))
        return restore_padding(output_TH, hidden_RTH, batch.real)

    def _fitting_parts(self, span: Span, adapter: AdapterWeights) -> AdapterWeights:
        parts = {block: part for block, part in adapter.items() if block in span}
        for block, part in parts.items():
            self._model.adapted.validate(block, part)
        return parts

    def compute(
        self, cache: SessionCache, hidden_RTH: torch.Tensor, real_RT: torch.Tensor | None, layout: StepLayout
    ) -> torch.Tensor:
        """One step of `cache`.

        Args:
            hidden_RTH: new slots of the sequences.
            real_RT: mask of the slots that hold tokens; None if no slot is padding.
            layout: layout of the tokens.

        Returns:
            outputs of the same shape; zero where padded.

        Raises:
            TooLong: a token lies beyond the last position of the model.
        """
        self._require_positions(layout)
        packed_TH = drop_padding(hidden_RTH, real_RT).to(self._model.device, self._model.dtype)
        with self._lock:
            output_TH = cache.step(packed_TH.contiguous(), layout)
        return restore_padding(output_TH, hidden_RTH, real_RT)

    def _require_positions(self, layout: StepLayout) -> None:
        limit = self._model.positions
        if limit is None:
            return
        end = max(layout.ends)
        if end > limit:
            raise TooLong(f"row {layout.ends.index(end)} reaches position {end}; this model has {limit} positions")


class LocalSession:
    """One session's caches for the local blocks, kept consistent with those of the servers.

    The local blocks compute a step before it is sent. If it fails at a server and is repeated, its tokens are simply
    computed again (a start below the cached length is a rollback), but its sequences must not be copied again.
    """

    def __init__(self, blocks: LocalBlocks, adapter: AdapterWeights = NO_ADAPTER) -> None:
        self._blocks = blocks
        self._cache = blocks.new_cache(blocks.span, adapter)
        self._copied: tuple[int, ...] | None = None
        """The sources of sequences that an unfinished step has copied; None if it has copied none."""
        self.timing: HopTiming | None = None
        """The time of the last step."""

    def copy(self, length: int, max_length: int) -> LocalSession:
        """Another session, which begins with the first `length` positions of this one's only sequence."""
        result = LocalSession(self._blocks, self._cache.adapter)
        result._cache.max_length = max_length
        result._cache.begin_with(self._cache, length)
        return result

    def compute(self, hidden_RTH: torch.Tensor, real_RT: torch.Tensor | None, layout: StepLayout) -> torch.Tensor:
        """The local outputs for a step's new slots, which are the inputs of the first server.

        Args:
            real_RT: mask of the slots that hold tokens; None if no slot is padding.
            layout: the layout that is sent to the servers.
        """
        began = time.perf_counter()
        sources = local_sources(layout.sources, self._copied)
        output = self._blocks.compute(self._cache, hidden_RTH, real_RT, replace(layout, sources=sources))
        if layout.sources is not None:
            self._copied = layout.sources
        seconds = time.perf_counter() - began
        self.timing = HopTiming(seconds, seconds)
        return output

    def confirm(self) -> None:
        """The servers have computed the last step, too."""
        self._copied = None


def local_sources(sources: tuple[int, ...] | None, copied: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The sources of a step's sequences in a local cache that may have copied sequences already.

    Args:
        sources: the step's sources in caches that have copied nothing.
        copied: the sources of a step that was computed locally and then failed at a server. The repeated step has the
            same sources, or a selection of them.
    """
    if sources is None or copied is None:
        return sources
    return tuple(copied.index(source) for source in sources)
