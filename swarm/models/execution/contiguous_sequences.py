"""The sequences of a session in a store of its own, and one forward for tokens of many sessions.

See `swarm.models.attention.contiguous_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from swarm.data_structures import StepLayout
from swarm.errors import WrongPosition
from swarm.models.attention.contiguous_attention import ContiguousBatch, ContiguousKV, ContiguousSegment
from swarm.models.attention.sequence_states import StateHistory
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart, adapter_segments


@dataclass
class StagedContiguousSequences:
    """Sequences as a step of this layout and these inputs, packed, leaves them."""

    sequences: ContiguousSequences
    store: ContiguousKV
    layout: StepLayout
    inputs: torch.Tensor

    @property
    def stores(self) -> tuple[ContiguousKV, ...]:
        """Stores that have the sequences in their rows, one after the other."""
        return (self.store,)

    def make_room(self, layout: StepLayout) -> int:
        """The store grows by itself."""
        return layout.tokens

    def commit(self) -> None:
        """Make them the session's sequences."""
        self.sequences.store, self.sequences.lengths = self.store, self.layout.lengths
        self.sequences.history.commit(self.store.states, self.layout, self.inputs)


class ContiguousSequences:
    """The sequences of one session, all in one store.

    Attributes:
        lengths: positions of each sequence.
        history: the states of layers that have one.

    Args:
        max_length: positions that no sequence will exceed; None if that is not known.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.store = ContiguousKV(0, max_length)
        self.lengths: tuple[int, ...] = ()
        self.history = StateHistory()

    def inputs_again(self, layout: StepLayout) -> list[torch.Tensor] | None:
        """See `StateHistory.inputs_again`."""
        return self.history.inputs_again(layout)

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedContiguousSequences:
        """The sequences copied and rolled back as the layout says."""
        store = self._arrange(layout)
        store.reserve(max(layout.lengths))
        store.states = self.history.stage(layout)
        if store is self.store:
            # The step overwrites what lies behind a start. If it fails, the session must not continue from there.
            self.lengths = tuple(map(min, self.lengths, layout.starts))
        return StagedContiguousSequences(self, store, layout, inputs)

    def beginning(self, length: int, max_length: int) -> ContiguousSequences:
        """See `SequenceStorage.beginning`."""
        result = ContiguousSequences(max_length)
        result.history = self.history.first_sequence(length)
        result.store = self.store.select_sequences([0], length, max_length)
        result.lengths = (length,)
        return result

    def _arrange(self, layout: StepLayout) -> ContiguousKV:
        known = len(self.lengths)
        sources = layout.sources if layout.sources is not None else tuple(range(layout.sequences))
        if sources == tuple(range(known)):
            return self.store
        if not any(layout.starts):
            return ContiguousKV(layout.sequences, self.store.max_length)
        # A sequence that is new, or begins again, may be a copy of any other: what is in it is not looked at.
        copied = [source if source < known else 0 for source in sources]
        return self.store.select_sequences(copied, max(layout.starts))


@dataclass(frozen=True)
class StagedWholeSequences:
    """Whole sequences, in a store for each run of equally long ones: no slot is left over."""

    stores: tuple[ContiguousKV, ...]

    def make_room(self, layout: StepLayout) -> int:
        """The stores have it."""
        return layout.tokens

    def commit(self) -> None:
        """Nothing is kept."""


class WholeSequences:
    """Sequences that one step brings from beginning to end, and of which nothing is kept.

    In one store, a long sequence beside many short ones would take its own length for each of them.
    """

    lengths: tuple[int, ...] = ()

    def inputs_again(self, layout: StepLayout) -> None:
        """Nothing goes back."""

    def beginning(self, length: int, max_length: int) -> WholeSequences:
        """Nothing is kept."""
        raise WrongPosition("a forward without a session keeps nothing")

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedWholeSequences:
        """Room for just the tokens of the step. Raises `WrongPosition` if it continues anything."""
        if any(layout.starts) or layout.sources is not None:
            raise WrongPosition("the sequences of a forward without a session begin at position 0")
        runs = [(count, len(list(run))) for count, run in itertools.groupby(layout.counts)]
        stores = [ContiguousKV(sequences, max_length=count) for count, sequences in runs]
        for store, (count, _) in zip(stores, runs, strict=True):
            store.reserve(count)
        return StagedWholeSequences(tuple(stores))


def compute_parts(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """The outputs of each part, whose sequences are staged ones of this module: one forward for all parts.

    Where layers have states, several tokens of a sequence have a forward of their own, with those of its neighbors that
    bring as many; single tokens share one.
    """
    if model.has_states and any(count > 1 for part in parts for count in part.layout.counts):
        return _compute_rows(model, parts)
    return _compute_together(model, parts)


def _compute_together(model: SpanModel, parts: Sequence[StepPart], tokens: int = 1) -> list[torch.Tensor]:
    """The outputs of each part. With `tokens`, their sequences bring so many each, or none."""
    hidden_NH, positions, batch = _packed(parts)
    with model.adapted.activate(adapter_segments(parts)), model.text_lengths(parts):
        output_NH = model.forward_tokens(hidden_NH, positions, batch, tokens)
    return list(output_NH.split([len(part.inputs) for part in parts]))


def _compute_rows(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    outputs = [torch.empty_like(part.inputs) for part in parts]
    together: list[_ChosenTokens] = []
    for part, output in zip(parts, outputs, strict=True):
        token = 0
        numbered = zip(itertools.count(), part.layout.starts, part.layout.counts)
        for (count, has_begun), group in itertools.groupby(numbered, key=lambda one: (one[2], one[1] > 0)):
            chosen = [number for number, _, _ in group]
            tokens = torch.arange(token, token + count * len(chosen), device=output.device).view(len(chosen), count)
            token += count * len(chosen)
            if count == 1:
                together.append(_choose_tokens(part, output, chosen, tokens))
            elif has_begun and model.strategy.by_token:
                for one in range(count):
                    _compute_into([_choose_tokens(part, output, chosen, tokens[:, one : one + 1], one)], model)
            elif count:
                _compute_into([_choose_tokens(part, output, chosen, tokens)], model, count)
    if together:
        _compute_into(together, model)
    return outputs


class _ChosenTokens(NamedTuple):
    """Some tokens of a part, where they are in it, and where all its outputs go."""

    part: StepPart
    tokens: torch.Tensor
    output: torch.Tensor


def _choose_tokens(
    part: StepPart, output: torch.Tensor, sequences: Sequence[int], tokens_ST: torch.Tensor, behind: int = 0
) -> _ChosenTokens:
    """The tokens of some sequences, of each from so many behind its first one on."""
    starts, counts = list(part.layout.starts), [0] * part.layout.sequences
    for number in sequences:
        starts[number] += behind
        counts[number] = tokens_ST.shape[1]
    tokens = tokens_ST.flatten()
    layout = replace(part.layout, starts=tuple(starts), counts=tuple(counts))
    return _ChosenTokens(replace(part, layout=layout, inputs=part.inputs[tokens]), tokens, output)


def _compute_into(chosen: Sequence[_ChosenTokens], model: SpanModel, tokens: int = 1) -> None:
    """Compute parts whose sequences bring so many tokens each, or none, and put their outputs where they belong."""
    outputs = _compute_together(model, [one.part for one in chosen], tokens)
    for one, output in zip(chosen, outputs, strict=True):
        one.output[one.tokens] = output


def fill_parts(model: SpanModel, parts: Sequence[StepPart]) -> None:
    """Store keys and values of the parts' tokens; see `SpanModel.fill_tokens`."""
    with model.adapted.activate(adapter_segments(parts)), model.text_lengths(parts):
        model.fill_tokens(*_packed(parts))


def _packed(parts: Sequence[StepPart]) -> tuple[torch.Tensor, list[int], ContiguousBatch]:
    """Hidden states and positions of the tokens of all parts, and where they belong."""
    segments: list[ContiguousSegment] = []
    positions: list[int] = []
    for part in parts:
        first = 0
        for store in part.staged.stores:
            layout = _rows(part.layout, first, first + store.sequences)
            first += store.sequences
            for segment in _segments(store, layout, len(positions)):
                segments.append(segment)
                for number, start in enumerate(segment.starts, segment.first):
                    offset = layout.offsets[number] if layout.offsets is not None else 0
                    positions.extend(range(start + offset, start + offset + segment.new))
    inputs = [part.inputs for part in parts]
    return inputs[0] if len(inputs) == 1 else torch.cat(inputs), positions, ContiguousBatch(segments)


def _rows(layout: StepLayout, first: int, end: int) -> StepLayout:
    """The part of a layout that is about some of the sequences. What they are copies of has been seen to."""
    if end - first == layout.sequences:
        return layout
    rows = slice(first, end)
    offsets, lengths = (one and one[rows] for one in (layout.offsets, layout.rope_lengths))
    return StepLayout(layout.starts[rows], layout.counts[rows], None, offsets, lengths)


def _segments(store: ContiguousKV, layout: StepLayout, token: int) -> Iterator[ContiguousSegment]:
    """Neighboring sequences for one call of attention: equally many tokens each, and either one or the same start."""
    sequences = zip(itertools.count(), layout.starts, layout.counts)
    for (new, _), group in itertools.groupby(sequences, key=lambda one: (one[2], one[1] if one[2] > 1 else 0)):
        members = list(group)
        if new:
            yield ContiguousSegment(store, members[0][0], tuple(start for _, start, _ in members), new, token)
            token += new * len(members)
