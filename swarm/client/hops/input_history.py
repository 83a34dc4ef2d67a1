"""What one hop of a session was sent so far, so that another server can take its place.

A step is only appended to a list. A replay folds the list into sequences, as a server would do it (copied, set back,
appended). What is folded for good, when the list has grown much longer than the sequences, cannot be taken apart again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from swarm.client.wire.packed_hidden import MAX_REQUEST_TOKENS, PackedHidden
from swarm.client.wire.reply_checks import AllowedExits, OutputShape
from swarm.data_structures import StepLayout, WireFormat
from swarm.protocol.input_checksum import LaterChecksum
from swarm.protocol.messages import ExitTerms, StepRequest

MAX_UNFOLDED_STEPS = 1024
MAX_UNFOLDED_TOKENS = 4 * MAX_REQUEST_TOKENS
"""Steps and tokens that are kept unfolded at most."""

MAX_REPLAY_TOKENS = 1024
"""Tokens of one request of a replay, unless there are more sequences. Servers have memory for as much of any peer; a
whole long text at once would be too large for many (decision 36)."""


@dataclass(frozen=True)
class Step:
    """One step of a session.

    Attributes:
        hidden: what goes into a hop.
        epoch, follows: see `StepRequest`.
        exits: when its tokens may leave inside a span; None for never.
        exit_block: see `StepRequest`.
    """

    number: int
    layout: StepLayout
    hidden: PackedHidden
    epoch: int = 0
    follows: int | None = None
    exits: ExitTerms | None = None
    exit_block: int | None = None

    @property
    def outputs(self) -> OutputShape:
        """What the answer to it has to hold."""
        exits = None
        if self.exits is not None:
            exits = AllowedExits(self.layout.counts, tuple(block for block, _ in self.exits.thresholds))
        return OutputShape(self.hidden.tokens, self.hidden.hidden_size, exits)

    def onward(self, hidden: PackedHidden) -> Step:
        """The same step at the hop behind, which gets `hidden`."""
        return Step(self.number, self.layout, hidden, self.epoch, self.follows, self.exits, self.exit_block)

    @cached_property
    def checksum(self) -> LaterChecksum:
        """That of what goes into the hop."""
        return LaterChecksum(self.request, self.hidden.payload)

    @property
    def request(self) -> StepRequest:
        """How it is sent to the hop, by this client or by the server before."""
        layout = self.layout
        return StepRequest(
            step=self.number,
            starts=list(layout.starts),
            counts=list(layout.counts),
            format=self.hidden.wire,
            dtype=self.hidden.dtype,
            sources=None if layout.sources is None else list(layout.sources),
            offsets=None if layout.offsets is None else list(layout.offsets),
            rope_lengths=None if layout.rope_lengths is None else list(layout.rope_lengths),
            epoch=self.epoch,
            follows=self.follows,
            exits=self.exits,
            left=None if self.hidden.left is None else list(self.hidden.left),
            exit_block=self.exit_block,
        )


@dataclass(frozen=True, slots=True)
class _TokenRun:
    """Consecutive tokens `[n, hidden]` of one sequence.

    Attributes:
        offset, rope_length: those of the sequence in the `StepLayout` of the step that brought the tokens.
    """

    offset: int
    rope_length: int
    hidden_TH: torch.Tensor


TokenRuns = tuple[_TokenRun, ...]
"""The tokens of one sequence."""


class InputHistory:
    """The inputs of one hop.

    Args:
        rows: the sequences with which it begins.

    Attributes:
        last: number of the newest step that is or was in it.
        folded: number of the last step that is folded for good: a replay cannot end before it.
    """

    def __init__(self, rows: tuple[TokenRuns, ...] = ()) -> None:
        self.last = self.folded = -1
        self._rows = rows
        self._steps: dict[int, Step] = {}
        self._unfolded = 0

    @property
    def begins_at(self) -> int:
        """Positions of its longest sequence that came before the first step."""
        return max(map(_length, self._rows), default=0) if self.folded < 0 else 0

    def copy(self) -> InputHistory:
        """What is in it now, for another thread."""
        result = InputHistory(self._rows)
        result.last, result._steps = self.last, dict(self._steps)
        return result

    def only_sequence(self, length: int) -> TokenRuns | None:
        """The first `length` tokens; None if there are not so many of one sequence alone, numbered from 0 on."""
        rows = self._rows_after(self.last)
        if len(rows) != 1 or _length(rows[0]) < length or any(run.offset or run.rope_length for run in rows[0]):
            return None
        return first_tokens(rows[0], length)

    def add(self, step: Step) -> None:
        """Remember the newest step's input. A step that is known already is left as it is: it may have been folded."""
        if step.number > self.last:
            self.last = step.number
            self._steps[step.number] = step
            self._unfolded += step.layout.tokens

    def add_replayed(self, layout: StepLayout, hidden: PackedHidden, done: int) -> None:
        """Append what went in during a replay of the steps up to number `done`, before all further steps."""
        self.last, self.folded = max(self.last, done), max(self.folded, done)
        self._rows = _extended(self._rows, Step(done, layout, hidden))

    def get(self, number: int) -> Step:
        """A step that has not been folded yet."""
        return self._steps[number]

    def find(self, number: int) -> Step | None:
        """A step, if it has come and has not been folded yet."""
        return self._steps.get(number)

    @property
    def tokens(self) -> int:
        """Tokens that a replay of everything has, at most: what was set back is counted twice."""
        return sum(map(_length, self._rows)) + self._unfolded

    def drop_after(self, after: int) -> None:
        """Forget the steps behind number `after`, which were given up."""
        for number in [number for number in self._steps if number > after]:
            del self._steps[number]

    def forget_from(self, first: int) -> None:
        """Forget the steps from number `first` on, which come again, perhaps with other values."""
        for number in [number for number in self._steps if number >= first]:
            del self._steps[number]
        self.last = min(self.last, first - 1)

    def fold_if_long(self, done: int) -> None:
        """Fold the steps up to number `done`, which will not be asked for singly any more, if they have become many."""
        if len(self._steps) >= MAX_UNFOLDED_STEPS or self._unfolded >= MAX_UNFOLDED_TOKENS:
            self.fold(done)

    def fold(self, done: int) -> None:
        """Fold the steps up to number `done`."""
        self._rows = self._rows_after(done)
        for number in [number for number in self._steps if number <= done]:
            del self._steps[number]
            self.folded = max(self.folded, number)
        self._unfolded = sum(step.layout.tokens for step in self._steps.values())

    def replay(self, done: int) -> Iterator[tuple[StepLayout, PackedHidden]]:
        """Requests that fill an empty cache with the steps up to number `done`. Lossless, whatever travelled before."""
        rows = self._rows_after(done)
        size = max(1, MAX_REPLAY_TOKENS // max(1, len(rows)))
        positions = [0] * len(rows)
        while any(position < _length(row) for position, row in zip(positions, rows, strict=True)):
            pieces = [_piece(row, position, size) for row, position in zip(rows, positions, strict=True)]
            counts = tuple(len(piece.hidden_TH) for piece in pieces)
            offsets = tuple(piece.offset for piece in pieces)
            lengths = tuple(piece.rope_length for piece in pieces)
            more = (one if any(one) else None for one in (offsets, lengths))
            yield StepLayout(tuple(positions), counts, None, *more), _packed(pieces)
            positions = [position + count for position, count in zip(positions, counts, strict=True)]

    def _rows_after(self, done: int) -> tuple[TokenRuns, ...]:
        """The sequences after step number `done`."""
        rows = self._rows
        for number in sorted(self._steps):
            if number <= done:
                rows = _extended(rows, self._steps[number])
        return tuple(_merged(row) for row in rows)


def _extended(rows: tuple[TokenRuns, ...], step: Step) -> tuple[TokenRuns, ...]:
    """The sequences after a step, as `swarm.models.execution.session_cache` has them."""
    layout, flat_TH = step.layout, step.hidden.decoded()
    bounds = itertools.accumulate(layout.counts, initial=0)
    sources = layout.sources if layout.sources is not None else range(layout.sequences)
    offsets, lengths = (one or (0,) * layout.sequences for one in (layout.offsets, layout.rope_lengths))
    result = []
    for (first, last), source, start, offset, length in zip(
        itertools.pairwise(bounds), sources, layout.starts, offsets, lengths, strict=True
    ):
        past = first_tokens(rows[source], start) if source < len(rows) else ()
        result.append((*past, _TokenRun(offset, length, flat_TH[first:last])) if last > first else past)
    return tuple(result)


def first_tokens(row: TokenRuns, length: int) -> TokenRuns:
    """The first `length` tokens of a sequence."""
    kept: list[_TokenRun] = []
    for run in row:
        if length <= 0:
            break
        kept.append(replace(run, hidden_TH=run.hidden_TH[:length]))
        length -= len(run.hidden_TH)
    return tuple(kept)


def _merged(row: TokenRuns) -> TokenRuns:
    """The same sequence in as few runs as possible, in memory of its own."""
    return tuple(
        _TokenRun(*alike, torch.cat([run.hidden_TH for run in runs]))
        for alike, runs in itertools.groupby(row, key=lambda run: (run.offset, run.rope_length))
    )


def run_bytes(row: TokenRuns) -> int:
    """What a sequence takes in memory."""
    return sum(run.hidden_TH.nbytes for run in row)


def _length(row: TokenRuns) -> int:
    return sum(len(run.hidden_TH) for run in row)


def _piece(row: TokenRuns, position: int, size: int) -> _TokenRun:
    """At most `size` tokens of one run of the sequence, from `position` on; none at its end."""
    for run in row:
        if position < len(run.hidden_TH):
            return replace(run, hidden_TH=run.hidden_TH[position : position + size])
        position -= len(run.hidden_TH)
    return _TokenRun(0, 0, torch.empty(0))


def _packed(pieces: list[_TokenRun]) -> PackedHidden:
    hidden_TH = torch.cat([piece.hidden_TH for piece in pieces if len(piece.hidden_TH)])
    return PackedHidden.of(hidden_TH, WireFormat.NONE)
