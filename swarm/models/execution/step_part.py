"""The next tokens of one step, as each way of computing (`packed_rows`, `page_rows`, `rectangle_rows`) gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import AdapterSegment, AdapterWeights


@dataclass(frozen=True, slots=True)
class StepPart:
    """Attributes:
    staged: rows as the step leaves them, of the kind that belongs to the way of computing.
    layout: how many tokens each of these rows brings.
    inputs: the tokens, `[tokens, hidden]`.
    adapter: what their client adds to blocks.
    """

    staged: Any
    layout: StepLayout
    inputs: torch.Tensor
    adapter: AdapterWeights


def adapter_shares(parts: Sequence[StepPart]) -> list[AdapterSegment]:
    """The adapters of packed tokens, one part behind the other; none if no part has any."""
    if not any(part.adapter for part in parts):
        return []
    return [AdapterSegment(part.adapter, _positions(part.layout)) for part in parts]


def _positions(layout: StepLayout) -> list[int]:
    rows = zip(layout.starts, layout.counts, strict=True)
    return [start + number for start, count in rows for number in range(count)]
