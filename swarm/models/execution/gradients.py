"""Gradients through frozen blocks: what a client's inputs and adapters need, and nothing for the blocks themselves.

The family's own modules run over rectangles, and torch's autograd goes back through them. Sequences are padded at their
ends: what comes behind a token is invisible to it, so nothing has to be masked. The backward computes the forward
again, and nothing is kept in between (Petals, section 2.2).

The memory of a graph is bounded: sequences that would make it too large are computed one after the other. If a single
sequence is too large, its graph keeps only the blocks' inputs and computes each block once more (Chen et al. 2016).
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
from swarm.errors import TrainingRefused
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
"""Memory that one graph may keep."""

GRAPH_HIDDEN_SIZES_PER_TOKEN = 24
"""Numbers that a graph keeps of a token in a block, in hidden sizes. Counted: 13 (llama) to 26 (mixtral), and more
where attention writes out its scores (bloom: 10 + 1/64 of the sequence's length)."""


@dataclass(frozen=True)
class SpanGradients:
    """Gradients of a span's inputs and of an adapter on its blocks.

    Attributes:
        inputs: `[tokens, hidden]`, in the span's dtype.
        parts: by block, one for each of `BlockAdapterWeights.tensors`, in that order, of the same shapes, float32.
    """

    inputs: torch.Tensor
    parts: dict[int, list[torch.Tensor]]


def forward_with_graph(
    model: SpanModel, inputs_TH: torch.Tensor, layout: StepLayout, adapter: AdapterWeights = NO_ADAPTER
) -> torch.Tensor:
    """Run whole sequences like `forward_without_cache`, with gradients for inputs and adapter if they require them.

    Args:
        inputs_TH: packed, in the span's dtype and on its device.

    Returns:
        outputs `[tokens, hidden]`.
    """
    sequences = inputs_TH.split(list(layout.counts))
    outputs = [sequences[0][:0]] * layout.sequences
    for group in padded_groups(layout):
        hidden_RTH = pad_sequence([sequences[number] for number in group], batch_first=True)
        result_RTH = _run(model, hidden_RTH, layout, group, adapter)
        for number, output_TH in zip(group, result_RTH, strict=True):
            outputs[number] = output_TH[: layout.counts[number]]
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
        gradients_TH: of the outputs, packed alike.

    Raises:
        TrainingRefused: the span reads weights from flash, and does not have all of them at once even for a block.
    """
    if model.flash is not None and not model.flash.trainable:
        raise TrainingRefused(
            f"blocks {model.span} are on flash, and only the weights that a token needs are read, so this server "
            "computes no gradients; train over servers whose blocks are in memory or streamed"
        )
    sequences = inputs_TH.detach().split(list(layout.counts))
    ends = gradients_TH.split(list(layout.counts))
    found = [one.new_zeros(one.shape) for one in sequences]
    parts = {block: part for block, part in sorted(adapter.items()) if block in model.span}
    totals = {
        block: [torch.zeros_like(tensor, dtype=torch.float32) for tensor in part.tensors]
        for block, part in parts.items()
    }
    with torch.enable_grad():
        for group in _groups_within_memory(model, layout):
            leaves = {block: part.map_tensors(_leaf) for block, part in parts.items()}
            hidden_RTH = pad_sequence([sequences[number] for number in group], batch_first=True).requires_grad_()
            result_RTH = _run(model, hidden_RTH, layout, group, leaves)
            requested = [hidden_RTH, *(tensor for part in leaves.values() for tensor in part.tensors)]
            ends_RTH = pad_sequence([ends[number] for number in group], batch_first=True)
            first, *rest = torch.autograd.grad(result_RTH, requested, ends_RTH, materialize_grads=True)
            for number, gradient_TH in zip(group, first, strict=True):
                found[number] = gradient_TH[: layout.counts[number]]
            for total, gradient in zip(itertools.chain(*totals.values()), rest, strict=True):
                total += gradient
    return SpanGradients(torch.cat(found), totals)


def _run(
    model: SpanModel, hidden_RTH: torch.Tensor, layout: StepLayout, group: Sequence[int], adapter: AdapterWeights
) -> torch.Tensor:
    """Some sequences as a rectangle, `[R, T, H]`; what comes behind their ends has no meaning."""
    sequences, length, _ = hidden_RTH.shape
    lists = (layout.offsets, layout.rope_lengths)
    offsets, lengths = ([one[number] for number in group] if one is not None else None for one in lists)
    segments = [AdapterSegment(adapter, list(range(length)) * sequences)] if adapter else []
    # A streamed block's weights are gone when the next blocks have run, so each is computed again before its backward.
    again = model.flash is not None or _graph_bytes(model, sequences * length) > MAX_GRAPH_BYTES
    with model.adapted.activate(segments), _checkpointed_blocks(model) if again else nullcontext():
        return model.run_padded(hidden_RTH, None, None, offsets, lengths)


def _graph_bytes(model: SpanModel, tokens: int) -> int:
    """Memory that a graph of so many tokens keeps."""
    return tokens * model.span.length * GRAPH_HIDDEN_SIZES_PER_TOKEN * model.hidden_size * model.dtype.itemsize


def graph_bytes(model: SpanModel, counts: Sequence[int]) -> int:
    """Memory that the largest graph for gradients of such sequences keeps, which exists one at a time.

    Args:
        counts: tokens of each sequence.
    """
    longest = max(counts)
    whole = _graph_bytes(model, longest)
    if whole <= MAX_GRAPH_BYTES and model.flash is None:
        return min(MAX_GRAPH_BYTES, _graph_bytes(model, 2 * sum(counts)))
    return whole // model.span.length + longest * model.span.length * model.hidden_size * model.dtype.itemsize


def _groups_within_memory(model: SpanModel, layout: StepLayout) -> Iterator[list[int]]:
    """Sequences that are computed as one rectangle, so few that their graph stays small enough."""
    for group in padded_groups(layout):
        longest = max(layout.counts[number] for number in group)
        size = max(1, MAX_GRAPH_BYTES // max(1, _graph_bytes(model, longest)))
        yield from (group[first : first + size] for first in range(0, len(group), size))


@contextmanager
def _checkpointed_blocks(model: SpanModel) -> Iterator[None]:
    """Meanwhile, graphs keep only the inputs of blocks, and compute the blocks again."""
    running = active_adapters()

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), ActiveAdapters(running)  # for the second time, in whatever thread that is

    own = [vars(layer).get("forward") for layer in model.layers]  # of a streamed block
    for layer in model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
    try:
        yield
    finally:
        for layer, forward in zip(model.layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a leaf that requires gradients."""
    return tensor.detach().requires_grad_()
