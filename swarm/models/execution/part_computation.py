"""Computing parts of steps of one model, however its sequences are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from swarm.models.execution import contiguous_sequences, padded_sequences, paged_sequences
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart
from swarm.models.execution.strategy import CacheLayout

_COMPUTATIONS: dict[CacheLayout, Callable[[SpanModel, Sequence[StepPart]], list[torch.Tensor]]] = {
    "contiguous": contiguous_sequences.compute_parts,
    "paged": paged_sequences.compute_parts,
    "padded": padded_sequences.compute_parts,
}

_FILLS: dict[CacheLayout, Callable[[SpanModel, Sequence[StepPart]], None]] = {
    "contiguous": contiguous_sequences.fill_parts,
    "paged": paged_sequences.fill_parts,
}


def compute_parts(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """The outputs of each part. Keys and values go to the sequences as their steps leave them."""
    return _COMPUTATIONS[model.strategy.layout](model, parts)


def fill_parts(model: SpanModel, parts: Sequence[StepPart]) -> None:
    """Only store keys and values, each block's from the same hidden states. For models with `SpanModel.can_fill`."""
    _FILLS[model.strategy.layout](model, parts)
