"""A session's rows as rectangles: they grow, are rolled back and are reordered independently of each other.

transformers computes on rectangles. Rows that grew together lie in one rectangle and stay there; rows that no longer
fit together (one was rolled back alone, a beam was copied) are copied into a new one. So the ordinary case, every row
one token further, copies nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import AdapterSegment, AdapterWeights
from swarm.models.attention.padded_kv import PaddedKV, PaddedSlice
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart


@dataclass(frozen=True, slots=True)
class _PaddedSequence:
    """Where a row's past lies: `length` positions from slot `pad` of row `index` of a rectangle."""

    rectangle: PaddedKV | None
    index: int
    pad: int
    length: int


_Uses = Counter[PaddedKV | None]
"""How many rows lie in each rectangle, before or after a step's copying."""

_EMPTY = _PaddedSequence(None, 0, 0, 0)


@dataclass
class StagedPaddedSequences:
    """Rows as a step leaves them, changed by every part of the step that is computed."""

    keeper: PaddedSequences
    rows: list[_PaddedSequence]

    def commit(self) -> None:
        self.keeper.rows = _compacted(self.rows)


class PaddedSequences:
    """The rows of one session.

    Args:
        model: the blocks, which make the rectangles.
    """

    def __init__(self, model: SpanModel) -> None:
        self.model = model
        self.rows: list[_PaddedSequence] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each row."""
        return tuple(row.length for row in self.rows)

    def stage(self, layout: StepLayout) -> StagedPaddedSequences:
        """The rows copied and set back as the layout says."""
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        rows = []
        for source, start in zip(sources, layout.starts, strict=True):
            row = self.rows[source] if source < len(self.rows) and start > 0 else _EMPTY
            rows.append(_PaddedSequence(row.rectangle, row.index, row.pad, start))
        return StagedPaddedSequences(self, rows)


def compute(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """Compute parts, whose drafts are `StagedPaddedSequences`s, one after the other."""
    return [_computed(model, part) for part in parts]


def _computed(model: SpanModel, part: StepPart) -> torch.Tensor:
    """The draft's rows get their new tokens."""
    draft: StagedPaddedSequences = part.staged
    bounds = list(itertools.accumulate(part.layout.counts, initial=0))
    output = torch.empty_like(part.inputs)
    kept = draft.keeper.rows
    uses = Counter(row.rectangle for row in kept) | Counter(row.rectangle for row in draft.rows)
    for group in padded_groups(part.layout):
        _compute_group(model, part, output, bounds, group, uses)
    return output


def _compute_group(
    model: SpanModel,
    part: StepPart,
    output_TH: torch.Tensor,
    bounds: Sequence[int],
    group: Sequence[int],
    uses: _Uses,
) -> None:
    """Compute the rows of `group` as one rectangle: read their tokens, write to `output_TH` and the draft."""
    draft: StagedPaddedSequences = part.staged
    layout, packed_TH = part.layout, part.inputs
    rows, counts = draft.rows, layout.counts
    new = max(counts[row] for row in group)
    rectangle = _rectangle(model, draft, group, uses)
    end = rectangle.length + new
    pads = [end - rows[row].length - counts[row] for row in group]
    offsets = [layout.offsets[row] for row in group] if layout.offsets is not None else None
    with model.adapted.activate(_shares(part.adapter, rectangle.length, new, pads)):
        if _is_whole(packed_TH, counts, group, new):
            hidden = packed_TH.view(len(group), new, -1)
            output_TH.copy_(model.forward(hidden, rectangle, pads, offsets).reshape(output_TH.shape))
        else:
            hidden = packed_TH.new_zeros(len(group), new, packed_TH.shape[-1])
            for place, row in enumerate(group):
                hidden[place, new - counts[row] :] = packed_TH[bounds[row] : bounds[row + 1]]
            result = model.forward(hidden, rectangle, pads, offsets)
            for place, row in enumerate(group):
                output_TH[bounds[row] : bounds[row + 1]] = result[place, new - counts[row] :]
    for place, row in enumerate(group):
        rows[row] = _PaddedSequence(rectangle, place, pads[place], rows[row].length + counts[row])


def _rectangle(model: SpanModel, draft: StagedPaddedSequences, group: Sequence[int], uses: _Uses) -> PaddedKV:
    """The rectangle that holds just these rows, all ending at the same slot; copied together if there is none."""
    rows = draft.rows
    first = rows[group[0]]
    if first.rectangle is None:
        return model.new_padded_kv()
    end = first.pad + first.length
    together = first.rectangle.rows == len(group) and all(
        rows[row].rectangle is first.rectangle and rows[row].index == place and rows[row].pad + rows[row].length == end
        for place, row in enumerate(group)
    )
    # A row outside of the group may be a copy that has not parted from its original yet.
    if not together or uses[first.rectangle] > len(group):
        return _copied([rows[row] for row in group])
    # What lies behind is going to be overwritten; should the step fail, nobody may continue from there.
    draft.keeper.rows = [
        replace(row, length=min(row.length, end - row.pad)) if row.rectangle is first.rectangle else row
        for row in draft.keeper.rows
    ]
    first.rectangle.truncate(end)
    return first.rectangle


def _shares(adapter: AdapterWeights, past: int, new: int, pads: Sequence[int]) -> list[AdapterSegment]:
    """What is added to the new slots of a rectangle."""
    return [AdapterSegment(adapter, [past + slot - pad for pad in pads for slot in range(new)])] if adapter else []


def padded_groups(layout: StepLayout) -> list[list[int]]:
    """Rows that can be computed as one rectangle: those that begin, padded on the left, and those of equal count.

    Beginning rows of very different lengths are divided further, so that at most half of a rectangle is padding.
    """
    fresh = [row for row, start in enumerate(layout.starts) if not start and layout.counts[row]]
    counts = [layout.counts[row] for row in fresh]
    ragged = len(fresh) * max(counts, default=0) > 2 * sum(counts)
    found: dict[int, list[int]] = {}
    for row in fresh:
        found.setdefault(-layout.counts[row].bit_length() if ragged else 0, []).append(row)
    for row, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
        if start and count:
            found.setdefault(count, []).append(row)
    return list(found.values())


def _copied(rows: Sequence[_PaddedSequence]) -> PaddedKV:
    pieces = [PaddedSlice(row.rectangle, row.index, row.pad, row.length) for row in rows if row.rectangle is not None]
    return PaddedKV.from_slices(pieces)


def _compacted(rows: list[_PaddedSequence]) -> list[_PaddedSequence]:
    """The rows, those that have stopped moved out of rectangles of which they are the lesser part.

    Without this, rows that end one after the other would each keep a rectangle of all rows alive.
    """
    holders: dict[PaddedKV, list[int]] = {}
    for place, row in enumerate(rows):
        if row.rectangle is not None:
            holders.setdefault(row.rectangle, []).append(place)
    for rectangle, places in holders.items():
        if 2 * len(places) <= rectangle.rows:
            copy = _copied([rows[place] for place in places])
            for index, place in enumerate(places):
                length = rows[place].length
                rows[place] = _PaddedSequence(copy, index, copy.length - length, length)
    return rows


def _is_whole(packed: torch.Tensor, counts: Sequence[int], group: Sequence[int], new: int) -> bool:
    """True if the group is the whole step and has no ragged row, so that packed tokens already form a rectangle."""
    return len(group) == len(counts) and packed.shape[0] == len(group) * new
