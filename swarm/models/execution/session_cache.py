"""One session's attention cache, and the computation of its steps, many sessions' steps at once.

A step is started, computed (whole, or in portions between other sessions' steps), and committed. Only a commit changes
the session's sequences, so a step that fails can be sent again.

There are three ways to store the sequences and to compute. `contiguous_sequences` and `paged_sequences` put tokens of
all sessions into one forward, and need a family whose attention can be exchanged; the latter keeps all sequences in
pages of one pool, which is for GPUs. `padded_sequences` is slow, readable, and works for every family. All give the
same results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from swarm.data_structures import StepLayout
from swarm.errors import WrongPosition
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution import contiguous_sequences, padded_sequences, paged_sequences
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits, compute_in_pieces, compute_parts
from swarm.models.execution.step_part import StepPart
from swarm.models.execution.strategy import ExecutionStrategy

PADDED_FORWARD_SLOTS = 4
"""Slots for each token of a forward in rectangles: half of a rectangle may be padding, and it may exist twice."""


class StagedSequences(Protocol):
    """The sequences of a session as a step leaves them, while it is being computed."""

    def make_room(self, layout: StepLayout) -> int:
        """Make room for the step's next tokens; for how many of them there is room now, at least one."""

    def commit(self) -> None:
        """Make them the session's sequences."""


class SequenceStorage(Protocol):
    """The keys and values of a session's sequences, in one of the three layouts."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each sequence."""

    def inputs_again(self, layout: StepLayout) -> list[torch.Tensor] | None:
        """What has to be computed again before a step's own tokens, `[tokens, hidden]` for each sequence; or None."""

    def beginning(self, length: int, max_length: int) -> SequenceStorage:
        """A copy of the first `length` positions of the first sequence, of which none will exceed `max_length`.

        Raises `WrongPosition` if blocks with states cannot go back so far.
        """

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedSequences:
        """Copy and roll back sequences as the layout says, without changing what the session could continue from.

        Args:
            inputs: the step's tokens, packed.
        """


@dataclass
class StepComputation:
    """A step that is being computed. Made by `SessionCache.start_step`.

    Attributes:
        model: the blocks that compute it.
        inputs: `[tokens, hidden]`, packed.
        staged: the session's sequences as this step leaves them.
        adapter: what the client adds to the blocks.
        exits: where its tokens may leave, and have left; None if all pass every block.
        tokens_done: how many of the packed tokens are computed.
        again: tokens of each sequence that are computed a second time, without an output; None if there are none.
    """

    model: SpanModel
    layout: StepLayout
    inputs: torch.Tensor
    staged: StagedSequences
    adapter: AdapterWeights = field(default_factory=dict)
    exits: StepExits | None = None
    tokens_done: int = 0
    again: tuple[int, ...] | None = None
    _outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def output(self) -> torch.Tensor:
        """What is computed so far, `[tokens_done, hidden]`; of a step with `again`, only when all of it is."""
        if len(self._outputs) != 1:
            self._outputs = [torch.cat(self._outputs) if self._outputs else self.inputs[:0]]
        if self.again is None:
            return self._outputs[0]
        pieces = self._outputs[0].split(list(self.layout.counts))
        return torch.cat([piece[again:] for piece, again in zip(pieces, self.again, strict=True)])

    @property
    def tokens_left(self) -> int:
        """Tokens still to be computed."""
        return self.layout.tokens - self.tokens_done

    def next_part(self, tokens: int) -> StepPart:
        """The next `tokens` packed tokens, or those of them that there is room for at once."""
        layout = self.next_layout(tokens)
        fitting = self.staged.make_room(layout)
        if fitting < tokens:
            tokens, layout = fitting, self.next_layout(fitting)
        inputs = self.inputs[self.tokens_done : self.tokens_done + tokens]
        return StepPart(self.model.span, self.staged, layout, inputs, self.adapter, self.layout.tokens)

    def next_layout(self, tokens: int) -> StepLayout:
        """The layout of the next `tokens` packed tokens: other sequences of the step bring none."""
        if not self.tokens_done and tokens == len(self.inputs):
            return replace(self.layout, sources=None) if self.layout.sources is not None else self.layout
        starts, counts = [], []
        bounds = itertools.accumulate(self.layout.counts, initial=0)
        for (first, last), start in zip(itertools.pairwise(bounds), self.layout.starts, strict=True):
            begin, end = max(first, self.tokens_done), min(last, self.tokens_done + tokens)
            starts.append(start + min(max(0, begin - first), last - first))
            counts.append(max(0, end - begin))
        return replace(self.layout, starts=tuple(starts), counts=tuple(counts), sources=None)

    def add_output(self, output: torch.Tensor) -> None:
        """Take the outputs of the next tokens."""
        self._outputs.append(output)
        self.tokens_done += len(output)

    def note_left(self, left: tuple[int, ...] | None) -> None:
        """Take where tokens have left by now."""
        if self.exits is not None and left is not None:
            self.exits = replace(self.exits, left=left)

    def commit(self) -> None:
        """Append what was computed to the session's sequences."""
        self.staged.commit()


class SessionCache:
    """The cached past of a session's sequences.

    Attributes:
        model: the blocks.
        adapter: what the session's client adds to them, which has been checked (`AdaptedLayers.validate`).
        max_length: positions that no sequence will exceed, so that no room is made for more; None if that is not known.
    """

    def __init__(self, model: SpanModel, adapter: AdapterWeights = NO_ADAPTER, max_length: int | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.max_length = max_length
        self._storage = self._empty_storage()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached positions of each sequence."""
        return self._storage.lengths

    def clear(self) -> None:
        """Free everything, even if others still hold the session. For any thread.

        A step in progress goes on, and has no effect.
        """
        self._storage = self._empty_storage()
        self.adapter = NO_ADAPTER

    def shared(self) -> SessionCache:
        """What is cached now, for others, who have it also when this is cleared."""
        result = SessionCache(self.model, max_length=self.max_length)
        result._storage = self._storage
        return result

    @torch.inference_mode()
    def begin_with(self, other: SessionCache, length: int) -> None:
        """Begin with a copy of the first `length` positions of another session's first sequence, in the same blocks.

        Only in the thread that computes steps. Raises `WrongPosition` if they are not there, or if blocks with states
        cannot go back so far.
        """
        self._storage = other._beginning(length, self.max_length or length)

    @torch.inference_mode()
    def trim(self, length: int) -> None:
        """Keep no more than the first `length` positions of the first sequence, without room for further ones.

        Raises as `begin_with`.
        """
        self._storage = self._beginning(length, length)
        self.max_length = length

    def _beginning(self, length: int, max_length: int) -> SequenceStorage:
        if not 0 < length <= max(self.lengths[:1], default=0):
            raise WrongPosition(f"position {length} is not cached; the first sequence has {self.lengths[:1] or 0}")
        return self._storage.beginning(length, max_length)

    def validate_layout(self, layout: StepLayout) -> None:
        """Raise `WrongPosition` if the layout does not continue what is cached."""
        lengths = self.lengths
        known = len(lengths)
        if layout.sources is not None:
            bad = [source for source in layout.sources if source >= known]
            if bad:
                raise WrongPosition(f"a sequence is to be copied from sequence {bad[0]}, but the session has {known}")
        for number, start in enumerate(layout.starts):
            source = layout.sources[number] if layout.sources is not None else number
            length = lengths[source] if source < known else 0
            if start > length:
                raise WrongPosition(
                    f"sequence {number} continues at position {start}, but only {length} positions are cached"
                )

    def start_step(
        self, packed_TH: torch.Tensor, layout: StepLayout, exits: StepExits | None = None
    ) -> StepComputation:
        """Prepare a step of the new tokens `packed_TH`, `[layout.tokens, hidden]`, one sequence after the other.

        With `exits`, each sequence brings one token at most.

        Raises `WrongPosition`. A step that is never committed leaves the sequences as they were, except that those
        which it rolled back stay so.
        """
        self.validate_layout(layout)
        again = self._storage.inputs_again(layout)
        lengths = None
        if again is not None:
            lengths = tuple(map(len, again))
            own = packed_TH.split(list(layout.counts))
            packed_TH = torch.cat([piece for pair in zip(again, own, strict=True) for piece in pair])
            layout = layout.moved_back(lengths)
        staged = self._storage.stage(layout, packed_TH)
        return StepComputation(self.model, layout, packed_TH, staged, self.adapter, exits, again=lengths)

    def step(self, packed_TH: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """Compute a whole step and append it to the cache; the outputs, packed alike."""
        step = self.start_step(packed_TH, layout)
        while step.tokens_left:
            advance_steps([(step, step.tokens_left)])
        step.commit()
        return step.output

    def _empty_storage(self) -> SequenceStorage:
        strategy = self.model.strategy
        if strategy.paging is not None:
            return paged_sequences.PagedSequences(strategy.paging.pool)
        if strategy.packed:
            return contiguous_sequences.ContiguousSequences(self.max_length)
        return padded_sequences.PaddedSequences(self.max_length)


class ForwardCache(SessionCache):
    """The sequences of one forward without a session: it brings all of them whole, and they are dropped with it.

    They take the room of their tokens, however different their lengths are. In the padded layout, which computes
    rectangles of sequences of similar lengths, it is twice that at most. In the paged layout, where each sequence takes
    whole pages, only those have pages that are being computed, and they are few at a time.

    Args:
        layout: of the forward.
    """

    def __init__(self, model: SpanModel, layout: StepLayout, adapter: AdapterWeights = NO_ADAPTER) -> None:
        super().__init__(model, adapter, max(layout.counts))

    def _empty_storage(self) -> SequenceStorage:
        strategy = self.model.strategy
        if strategy.paging is not None:
            return paged_sequences.WholePagedSequences(strategy.paging.pool)
        if strategy.packed:
            return contiguous_sequences.WholeSequences()
        return padded_sequences.PaddedSequences(max_length=0)  # room for no position that is not there yet


def forward_slots(strategy: ExecutionStrategy, counts: Sequence[int]) -> int:
    """Slots for keys and values, in each block, that a forward without a session takes at most at any moment.

    Args:
        counts: tokens of each sequence.
    """
    if strategy.paging is not None:
        page_size = strategy.paging.pool.page_size
        pages = [-(-count // page_size) for count in counts]
        return min(sum(pages), max(pages) + paged_sequences.MAX_FORWARD_PAGES) * page_size
    return sum(counts) if strategy.packed else PADDED_FORWARD_SLOTS * sum(counts)


def advance_steps(portions: Sequence[tuple[StepComputation, int]]) -> None:
    """Compute the next tokens of some steps of the same model, in one forward if its family allows that.

    If the model `joins_parts`, steps may also be of different parts of one span. Then they share a pass over it, which
    each step joins in front of its first block and leaves behind its last one.

    Args:
        portions: different steps, and how many packed tokens of each to compute, at most what is left. A forward of
            short sequences computes fewer of them where each takes a page.
    """
    portions = [(step, tokens) for step, tokens in portions if tokens]
    if not portions:
        return
    model = portions[0][0].model
    # Padded steps are computed one after the other. Each one counts at once, also if a later one fails.
    forwards = [portions] if model.strategy.packed else [[portion] for portion in portions]
    for together in forwards:
        parts = [step.next_part(tokens) for step, tokens in together]
        if model.flash is not None:
            model.flash.begin_forward([count for part in parts for count in part.layout.counts if count])
        if any(step.exits is not None or step.model.span != model.span for step, _ in together):
            outputs, left = compute_in_pieces(model.whole, parts, [step.exits for step, _ in together])
            for (step, _), one in zip(together, left, strict=True):
                step.note_left(one)
        else:
            outputs = compute_parts(model, parts)
        for (step, _), output in zip(together, outputs, strict=True):
            step.add_output(output)


def forward_without_cache(
    model: SpanModel, packed_TH: torch.Tensor, layout: StepLayout, adapter: AdapterWeights = NO_ADAPTER
) -> torch.Tensor:
    """Run whole sequences, packed as in `SessionCache.step`, and keep nothing."""
    return ForwardCache(model, layout, adapter).step(packed_TH, layout)
