"""A part of one step: the tokens of it that one forward computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.data_structures import Span, StepLayout
from swarm.models.adapters.adapter_batch import AdapterSegment, AdapterWeights


@dataclass(frozen=True, slots=True)
class StepPart:
    """The next tokens of one step, as the contiguous, paged and padded computations get them.

    Attributes:
        span: the blocks that the step needs.
        staged: the sequences as the step leaves them, of the class that belongs to the layout of the cache.
        layout: how many tokens each of these sequences brings.
        inputs: the tokens, `[tokens, hidden]`.
        adapter: what their client adds to blocks.
        of_step: how many tokens the whole step brings.
    """

    span: Span
    staged: Any
    layout: StepLayout
    inputs: torch.Tensor
    adapter: AdapterWeights
    of_step: int


def adapter_segments(parts: Sequence[StepPart]) -> list[AdapterSegment]:
    """The adapters of packed tokens, one part after the other; none if no part has one."""
    if not any(part.adapter for part in parts):
        return []
    return [AdapterSegment(part.adapter, _positions(part.layout)) for part in parts]


def _positions(layout: StepLayout) -> list[int]:
    sequences = zip(layout.starts, layout.counts, strict=True)
    return [start + number for start, count in sequences for number in range(count)]
