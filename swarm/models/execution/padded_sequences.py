"""The sequences of a session in rectangles: they grow, are rolled back and are reordered independently of each other.

transformers computes on rectangles. Sequences that grew together lie in one rectangle and stay there. Sequences that no
longer fit together (one was rolled back alone, a beam was copied) are copied into a new one. So the ordinary case,
every sequence one token further, copies nothing.
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
    """Where a sequence's past lies: `length` positions from slot `pad` of row `index` of a rectangle."""

    rectangle: PaddedKV | None
    index: int
    pad: int
    length: int


_Uses = Counter[PaddedKV | None]
"""How many sequences lie in each rectangle, before or after a step's copying."""

_EMPTY = _PaddedSequence(None, 0, 0, 0)


@dataclass
class StagedPaddedSequences:
    """Sequences as a step leaves them, changed by every part of the step that is computed."""

    session: PaddedSequences
    sequences: list[_PaddedSequence]

    def make_room(self, layout: StepLayout) -> int:
        """Rectangles grow by themselves."""
        return layout.tokens

    def commit(self) -> None:
        """Make them the session's sequences."""
        self.session.sequences = _compacted(self.sequences)


class PaddedSequences:
    """The sequences of one session.

    Attributes:
        max_length: positions that no sequence will exceed; None if that is not known.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length
        self.sequences: list[_PaddedSequence] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each sequence."""
        return tuple(one.length for one in self.sequences)

    def inputs_again(self, layout: StepLayout) -> None:
        """Keys and values go back by themselves."""

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedPaddedSequences:
        """The sequences copied and rolled back as the layout says."""
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        staged = []
        for source, start in zip(sources, layout.starts, strict=True):
            past = self.sequences[source] if source < len(self.sequences) and start > 0 else _EMPTY
            staged.append(replace(past, length=start))
        return StagedPaddedSequences(self, staged)

    def beginning(self, length: int, max_length: int) -> PaddedSequences:
        """See `SequenceStorage.beginning`."""
        result, first = PaddedSequences(max_length), self.sequences[0]
        assert first.rectangle is not None
        copy = PaddedKV.from_slices([PaddedSlice(first.rectangle, first.index, first.pad, length)], max_length)
        result.sequences = [_PaddedSequence(copy, 0, 0, length)]
        return result


def compute_parts(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """Compute parts, whose sequences are `StagedPaddedSequences`, one after the other; the outputs of each."""
    return [_compute_part(model, part) for part in parts]


def _compute_part(model: SpanModel, part: StepPart) -> torch.Tensor:
    """Append the new tokens to the staged sequences."""
    staged: StagedPaddedSequences = part.staged
    bounds = list(itertools.accumulate(part.layout.counts, initial=0))
    output = torch.empty_like(part.inputs)
    before = Counter(one.rectangle for one in staged.session.sequences)
    uses = before | Counter(one.rectangle for one in staged.sequences)
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
    """Compute the sequences of `group` as one rectangle: read their tokens, write to `output_TH` and `part.staged`."""
    staged: StagedPaddedSequences = part.staged
    layout, packed_TH = part.layout, part.inputs
    sequences, counts = staged.sequences, layout.counts
    new = max(counts[number] for number in group)
    rectangle = _rectangle(model, staged, group, uses)
    end = rectangle.length + new
    pads = [end - sequences[number].length - counts[number] for number in group]
    lists = (layout.offsets, layout.rope_lengths)
    offsets, lengths = ([one[number] for number in group] if one is not None else None for one in lists)
    with model.adapted.activate(_adapter_segments(part.adapter, rectangle.length, new, pads)):
        if _is_whole(packed_TH, counts, group, new):
            hidden = packed_TH.view(len(group), new, -1)
            output_TH.copy_(model.forward(hidden, rectangle, pads, offsets, lengths).reshape(output_TH.shape))
        else:
            hidden = packed_TH.new_zeros(len(group), new, packed_TH.shape[-1])
            for place, number in enumerate(group):
                hidden[place, new - counts[number] :] = packed_TH[bounds[number] : bounds[number + 1]]
            result = model.forward(hidden, rectangle, pads, offsets, lengths)
            for place, number in enumerate(group):
                output_TH[bounds[number] : bounds[number + 1]] = result[place, new - counts[number] :]
    for place, number in enumerate(group):
        length = sequences[number].length + counts[number]
        sequences[number] = _PaddedSequence(rectangle, place, pads[place], length)


def _rectangle(model: SpanModel, staged: StagedPaddedSequences, group: Sequence[int], uses: _Uses) -> PaddedKV:
    """The rectangle of just these sequences, all ending at the same slot; they are copied together if there is none."""
    sequences = staged.sequences
    first = sequences[group[0]]
    if first.rectangle is None:
        return model.new_padded_kv(staged.session.max_length)
    end = first.pad + first.length
    together = first.rectangle.sequences == len(group) and all(
        one.rectangle is first.rectangle and one.index == place and one.pad + one.length == end
        for place, one in enumerate(sequences[number] for number in group)
    )
    # A sequence outside of the group may be a copy that has not parted from its original yet.
    if not together or uses[first.rectangle] > len(group):
        return _copied([sequences[number] for number in group])
    # The step overwrites what lies behind. If it fails, the session must not continue from there.
    staged.session.sequences = [
        replace(one, length=min(one.length, end - one.pad)) if one.rectangle is first.rectangle else one
        for one in staged.session.sequences
    ]
    first.rectangle.truncate(end)
    return first.rectangle


def _adapter_segments(adapter: AdapterWeights, past: int, new: int, pads: Sequence[int]) -> list[AdapterSegment]:
    """What is added to the new slots of a rectangle."""
    return [AdapterSegment(adapter, [past + slot - pad for pad in pads for slot in range(new)])] if adapter else []


def padded_groups(layout: StepLayout) -> list[list[int]]:
    """Sequences to compute as one rectangle: those that begin, padded on the left, and those of equal count.

    Beginning sequences of very different lengths are divided further, so that at most half of a rectangle is padding.
    """
    fresh = [number for number, start in enumerate(layout.starts) if not start and layout.counts[number]]
    counts = [layout.counts[number] for number in fresh]
    ragged = len(fresh) * max(counts, default=0) > 2 * sum(counts)
    groups: dict[int, list[int]] = {}
    for number in fresh:
        groups.setdefault(-layout.counts[number].bit_length() if ragged else 0, []).append(number)
    for number, (start, count) in enumerate(zip(layout.starts, layout.counts, strict=True)):
        if start and count:
            groups.setdefault(count, []).append(number)
    return list(groups.values())


def _copied(sequences: Sequence[_PaddedSequence]) -> PaddedKV:
    return PaddedKV.from_slices(
        [PaddedSlice(one.rectangle, one.index, one.pad, one.length) for one in sequences if one.rectangle is not None]
    )


def _compacted(sequences: list[_PaddedSequence]) -> list[_PaddedSequence]:
    """The sequences, moved out of rectangles that have rows for others too.

    Without this, sequences that end one after the other would each keep a rectangle of all of them alive. With it, all
    rectangles together have one row for each sequence at most, which is what a session reserves.
    """
    holders: dict[PaddedKV, list[int]] = {}
    for place, one in enumerate(sequences):
        if one.rectangle is not None:
            holders.setdefault(one.rectangle, []).append(place)
    for rectangle, places in holders.items():
        if len({sequences[place].index for place in places}) < rectangle.sequences:
            copy = _copied([sequences[place] for place in places])
            for index, place in enumerate(places):
                length = sequences[place].length
                sequences[place] = _PaddedSequence(copy, index, copy.length - length, length)
    return sequences


def _is_whole(packed: torch.Tensor, counts: Sequence[int], group: Sequence[int], new: int) -> bool:
    """True if the group is the whole step and all counts are equal: packed tokens are a rectangle already."""
    return len(group) == len(counts) and packed.shape[0] == len(group) * new
