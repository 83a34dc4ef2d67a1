"""Gradients through frozen blocks: what a client's inputs and adapters need, and nothing for the blocks themselves.

The family's own modules run over rectangles, and torch's autograd goes back through them. Rows are padded at their
ends: what comes behind a token is invisible to it, so nothing has to be masked. A forward is computed again in the
backward, and nothing is kept in between (Petals, section 2.2).

What a graph remembers is bounded: rows that would make it too large are computed one after the other. Of a row that
does so alone only the blocks' inputs are remembered, and each block is computed once more (Chen et al. 2016).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import (
    NO_ADAPTER,
    ActiveAdapters,
    AdapterSegment,
    AdapterWeights,
    active_adapters,
)
from swarm.models.execution.padded_sequences import padded_groups
from swarm.models.execution.span_model import SpanModel

MAX_GRAPH_BYTES = 1 << 29
"""Bytes that one graph may remember."""

GRAPH_HIDDEN_SIZES_PER_TOKEN = 24
"""Numbers that a graph remembers of a token in a block, in hidden sizes. Counted: 13 (llama) to 26 (mixtral), and more
where attention writes out its scores (bloom: 10 + 1/64 of the row's length)."""


@dataclass(frozen=True)
class SpanGradients:
    """Attributes:
    inputs: `[tokens, hidden]`, in the span's dtype.
    parts: by block, one for each of `BlockAdapterWeights.tensors`, in that order, of the same shapes, float32.
    """

    inputs: torch.Tensor
    parts: dict[int, list[torch.Tensor]]


def forward_with_graph(
    model: SpanModel, inputs_TH: torch.Tensor, layout: StepLayout, adapter: AdapterWeights = NO_ADAPTER
) -> torch.Tensor:
    """Run whole sequences, as `kv_cache.forward_packed`, with a way back to inputs and adapter if they want gradients.

    Args:
        inputs_TH: packed, in the span's dtype and on its device.

    Returns:
        outputs `[tokens, hidden]`.
    """
    rows = inputs_TH.split(list(layout.counts))
    outputs = [rows[0][:0]] * layout.sequences
    for group in padded_groups(layout):
        hidden_RTH = pad_sequence([rows[row] for row in group], batch_first=True)
        result_RTH = _run(model, hidden_RTH, layout, group, adapter)
        for row, output_TH in zip(group, result_RTH, strict=True):
            outputs[row] = output_TH[: layout.counts[row]]
    return torch.cat(outputs)


def compute_gradients(
    model: SpanModel,
    inputs_TH: torch.Tensor,
    gradients_TH: torch.Tensor,
    layout: StepLayout,
    adapter: AdapterWeights = NO_ADAPTER,
) -> SpanGradients:
    """Gradients of a forward over whole sequences.

    Args:
        inputs_TH: packed, in the span's dtype and on its device.
        gradients_TH: of the outputs, alike.
    """
    rows = inputs_TH.detach().split(list(layout.counts))
    ends = gradients_TH.split(list(layout.counts))
    found = [row.new_zeros(row.shape) for row in rows]
    parts = {block: part for block, part in sorted(adapter.items()) if block in model.span}
    totals = {
        block: [torch.zeros_like(tensor, dtype=torch.float32) for tensor in part.tensors]
        for block, part in parts.items()
    }
    with torch.enable_grad():
        for group in _groups(model, layout):
            leaves = {block: part.map_tensors(_leaf) for block, part in parts.items()}
            hidden_RTH = pad_sequence([rows[row] for row in group], batch_first=True).requires_grad_()
            result_RTH = _run(model, hidden_RTH, layout, group, leaves)
            wanted = [hidden_RTH, *(tensor for part in leaves.values() for tensor in part.tensors)]
            ends_RTH = pad_sequence([ends[row] for row in group], batch_first=True)
            first, *rest = torch.autograd.grad(result_RTH, wanted, ends_RTH, materialize_grads=True)
            for row, gradient_TH in zip(group, first, strict=True):
                found[row] = gradient_TH[: layout.counts[row]]
            for total, gradient in zip(itertools.chain(*totals.values()), rest, strict=True):
                total += gradient
    return SpanGradients(torch.cat(found), totals)


def _run(
    model: SpanModel, hidden_RTH: torch.Tensor, layout: StepLayout, group: Sequence[int], adapter: AdapterWeights
) -> torch.Tensor:
    """Some rows as a rectangle, `[R, T, H]`; what comes behind their ends has no meaning."""
    rows, length, _ = hidden_RTH.shape
    offsets = [layout.offsets[row] for row in group] if layout.offsets is not None else None
    segments = [AdapterSegment(adapter, list(range(length)) * rows)] if adapter else []
    too_large = _graph(model, rows * length) > MAX_GRAPH_BYTES
    with model.adapted.activate(segments), _frugal(model) if too_large else nullcontext():
        return model.run_padded(hidden_RTH, None, None, offsets)


def _graph(model: SpanModel, tokens: int) -> int:
    """Bytes that a graph of so many tokens remembers."""
    return tokens * model.span.length * GRAPH_HIDDEN_SIZES_PER_TOKEN * model.hidden_size * model.dtype.itemsize


def _groups(model: SpanModel, layout: StepLayout) -> Iterator[list[int]]:
    """Rows that are computed as one rectangle, as few as the size of their graph demands."""
    for group in padded_groups(layout):
        longest = max(layout.counts[row] for row in group)
        rows = max(1, MAX_GRAPH_BYTES // max(1, _graph(model, longest)))
        yield from (group[first : first + rows] for first in range(0, len(group), rows))


@contextmanager
def _frugal(model: SpanModel) -> Iterator[None]:
    """Graphs that are made meanwhile remember blocks' inputs and compute the blocks again."""
    running = active_adapters()

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), ActiveAdapters(running)  # for the second time, in whatever thread that is

    for layer in model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which gradients are wanted."""
    return tensor.detach().requires_grad_()
