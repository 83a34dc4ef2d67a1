"""One session's attention cache, and the computation of its steps, many sessions' at once.

A step is begun, computed (whole, or in portions between other sessions' steps), and committed. Only then do the
session's rows change: a step that fails can be sent again.

There are three ways to lay out sequences and to compute. `contiguous_sequences` and `paged_sequences` put tokens of all
sessions into one forward and need a family whose attention can be exchanged; the latter keeps all sequences in pages of
one pool, which is for GPUs. `padded_sequences` is slow, readable, and works for every family. All give the same
results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from swarm.data_structures import StepLayout
from swarm.errors import WrongPosition
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution import contiguous_sequences, padded_sequences, paged_sequences
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart


class StagedSequences(Protocol):
    """The rows of a session as a step leaves them, while it is being computed."""

    def commit(self) -> None:
        """Make them the session's rows."""


class SequenceStorage(Protocol):
    """A session's rows."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def stage(self, layout: StepLayout) -> StagedSequences:
        """Arrange the rows as the layout says (copied, set back) without changing what the session could go on from."""


@dataclass
class StepComputation:
    """A step that is being computed. Made by `SessionCache.begin`.

    Attributes:
        model: the blocks that compute it; only works of the same blocks can be computed together.
        inputs: `[tokens, hidden]`, packed.
        adapter: what the client adds to the blocks.
        done: how many of the packed tokens are computed.
    """

    model: SpanModel
    layout: StepLayout
    inputs: torch.Tensor
    staged: StagedSequences
    adapter: AdapterWeights = field(default_factory=dict)
    tokens_done: int = 0
    _outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def output(self) -> torch.Tensor:
        """What is computed so far, `[done, hidden]`."""
        if len(self._outputs) != 1:
            self._outputs = [torch.cat(self._outputs) if self._outputs else self.inputs[:0]]
        return self._outputs[0]

    @property
    def tokens_left(self) -> int:
        """Tokens still to be computed."""
        return self.layout.tokens - self.tokens_done

    def add_output(self, output: torch.Tensor) -> None:
        """The next tokens are computed."""
        self._outputs.append(output)
        self.tokens_done += len(output)

    def commit(self) -> None:
        """Append what was computed to the session's rows."""
        self.staged.commit()

    def next_layout(self, tokens: int) -> StepLayout:
        """The layout of the next `tokens` packed tokens: other rows of the step bring none."""
        if not self.tokens_done and tokens == len(self.inputs):
            return replace(self.layout, sources=None) if self.layout.sources is not None else self.layout
        starts, counts = [], []
        bounds = itertools.accumulate(self.layout.counts, initial=0)
        for (first, last), start in zip(itertools.pairwise(bounds), self.layout.starts, strict=True):
            begin, end = max(first, self.tokens_done), min(last, self.tokens_done + tokens)
            starts.append(start + min(max(0, begin - first), last - first))
            counts.append(max(0, end - begin))
        return StepLayout(tuple(starts), tuple(counts), None, self.layout.offsets)


class SessionCache:
    """The cached past of a session's rows.

    Attributes:
        model: the blocks.
        adapter: what the session's client adds to them, which has been checked (`AdaptedLayers.validate`).
    """

    def __init__(self, model: SpanModel, adapter: AdapterWeights = NO_ADAPTER) -> None:
        self.model = model
        self.adapter = adapter
        self._storage = _empty_rows(model)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached positions of each row."""
        return self._storage.lengths

    def clear(self) -> None:
        """Forget everything, whoever still has the session. For any thread: a step in progress goes on, for nothing."""
        self._storage = _empty_rows(self.model)
        self.adapter = NO_ADAPTER

    def validate_layout(self, layout: StepLayout) -> None:
        """Raise `WrongPosition` if the layout does not continue what is cached."""
        lengths = self.lengths
        known = len(lengths)
        if layout.sources is not None:
            bad = [source for source in layout.sources if source >= known]
            if bad:
                raise WrongPosition(f"a row is to be copied from row {bad[0]}, but the session has {known} rows")
        for row, start in enumerate(layout.starts):
            source = layout.sources[row] if layout.sources is not None else row
            length = lengths[source] if source < known else 0
            if start > length:
                raise WrongPosition(f"row {row} continues at position {start}, but only {length} positions are cached")

    def start_step(self, packed_TH: torch.Tensor, layout: StepLayout) -> StepComputation:
        """Prepare a step: `packed_TH` is `[layout.tokens, hidden]`, the rows' new tokens one row after the other.

        Raises `WrongPosition`. A step that is never committed leaves the rows as they were, except that rows which it
        set back stay so.
        """
        self.validate_layout(layout)
        return StepComputation(self.model, layout, packed_TH, self._storage.stage(layout), self.adapter)

    def step(self, packed_TH: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """Compute a whole step and append it to the cache; the outputs, packed alike."""
        work = self.start_step(packed_TH, layout)
        advance_steps([(work, work.tokens_left)])
        work.commit()
        return work.output


def _empty_rows(model: SpanModel) -> SequenceStorage:
    if not model.packed:
        return padded_sequences.PaddedSequences(model)
    return (
        paged_sequences.PagedSequences(model.paging.pool)
        if model.paging is not None
        else contiguous_sequences.ContiguousSequences()
    )


def advance_steps(portions: Sequence[tuple[StepComputation, int]]) -> None:
    """Compute the next tokens of some works, all of the same model, in one forward if its family allows.

    Args:
        portions: works, none of them twice, and how many packed tokens of each to compute, at most what is left.
    """
    portions = [(work, tokens) for work, tokens in portions if tokens]
    if not portions:
        return
    model = portions[0][0].model
    if model.packed:
        _advance(portions, paged_sequences.compute if model.paging is not None else contiguous_sequences.compute)
    else:
        for portion in portions:
            _advance([portion], padded_sequences.compute)


def _advance(portions: Sequence[tuple[StepComputation, int]], compute: Callable[..., list[torch.Tensor]]) -> None:
    parts = [
        StepPart(
            work.staged,
            work.next_layout(tokens),
            work.inputs[work.tokens_done : work.tokens_done + tokens],
            work.adapter,
        )
        for work, tokens in portions
    ]
    outputs = compute(portions[0][0].model, parts)
    for (work, _), output in zip(portions, outputs, strict=True):
        work.add_output(output)


def forward_without_cache(
    model: SpanModel, packed_TH: torch.Tensor, layout: StepLayout, adapter: AdapterWeights = NO_ADAPTER
) -> torch.Tensor:
    """Run whole sequences. Same packing as `SessionCache.step`, nothing is kept."""
    return SessionCache(model, adapter).step(packed_TH, layout)
