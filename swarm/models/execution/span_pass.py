"""One pass over a span for steps that need different blocks of it.

The span is computed piece by piece. A step of a part of the span joins the pass in front of its first block, and leaves
it behind its last one. So what takes time, reading the weights, is done once for all of them. Their outputs are there
when the pass ends.

A step may also let its tokens leave early, after "An Efficient Inference Framework for Early-exit LLMs", sections 2 and
3. Behind each piece, tokens that are sure leave: their hidden states stay as they are, and in the blocks that follow
they only get keys and values, projected from these hidden states. The others go on, together with the tokens of steps
that let none leave. However other steps cut the pass, keys and values are stored by whole pieces between exits, which
were chosen for speed: nothing in the pass waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from swarm.data_structures import ExitConfidence, ExitThresholds, Span
from swarm.models.execution import contiguous_sequences, padded_sequences, paged_sequences
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart
from swarm.models.execution.strategy import CacheLayout
from swarm.models.exits.span_exits import SpanExits, sequences_that_leave

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


@dataclass(frozen=True)
class StepExits:
    """Where the new tokens of a step may leave, and where they have left. Each sequence brings one token at most.

    Attributes:
        terms: None if no more tokens leave.
        left: for each sequence, the block in front of which its token has left; 0 if it has not.
    """

    terms: ExitThresholds | None
    left: tuple[int, ...]


class _PartUnderWay:
    """A part of a step between two pieces of the span.

    Attributes:
        span: the blocks that the step needs.
        pieces: these blocks, cut only where its own tokens may leave.
        hidden_TH: the hidden states of its tokens.
        before_TH: those in front of the piece before, for the tokens that passed it.
        left: see `StepExits`; None for a step whose tokens all stay.
    """

    def __init__(self, part: StepPart, exits: StepExits | None, offered: SpanExits | None) -> None:
        self.span = part.span
        self.pieces = offered.pieces(part.span) if offered is not None else [part.span]
        self._part = part
        self.hidden_TH = self.before_TH = part.inputs
        self.left = list(exits.left) if exits is not None else None
        self.terms = exits.terms if exits is not None else None
        # The sequence of each token, where tokens leave.
        self._sequences = [number for number, count in enumerate(part.layout.counts) if count]
        # A batch whose sequences leave together leaves only as a whole: not where it is computed in portions.
        if self.terms is not None and self.terms.batch == "all" and part.of_step != len(part.inputs):
            self.terms = None
        self._sure: set[int] = set()

    def tokens(self, left: bool) -> list[int] | None:
        """Numbers of the tokens that have left, or that have not; None for all of them."""
        if self.left is None:
            return [] if left else None
        chosen = [token for token, number in enumerate(self._sequences) if bool(self.left[number]) == left]
        return None if len(chosen) == len(self._sequences) else chosen

    def chosen_part(self, left: bool) -> StepPart | None:
        """The part with only those tokens; None if there are none."""
        tokens = self.tokens(left)
        if tokens is None:
            return replace(self._part, inputs=self.hidden_TH)
        if not tokens:
            return None
        kept = {self._sequences[token] for token in tokens}
        layout = self._part.layout
        counts = tuple(count if number in kept else 0 for number, count in enumerate(layout.counts))
        return replace(self._part, layout=replace(layout, counts=counts), inputs=self.hidden_TH[tokens])

    def advance(self, output: torch.Tensor) -> None:
        """Take the hidden states, behind a piece, of the tokens that have not left."""
        self.before_TH = self.hidden_TH
        tokens = self.tokens(left=False)
        if tokens is None:
            self.hidden_TH = output
        else:
            index = torch.tensor(tokens, dtype=torch.long, device=output.device)
            self.hidden_TH = self.hidden_TH.index_copy(0, index, output)

    def waiting(self) -> list[int]:
        """Numbers of the sequences whose tokens have not left, in the order of the tokens."""
        return [number for number in self._sequences if not (self.left and self.left[number])]

    def let_leave(self, block: int, sure: Collection[int]) -> None:
        """Let sequences leave in front of a block, where the tokens of these are sure."""
        assert self.left is not None
        assert self.terms is not None
        self._sure.update(sure)
        for number in sequences_that_leave(self.terms.batch, self.waiting(), self._sure):
            self.left[number] = block


@torch.inference_mode()
def compute_in_pieces(
    whole: SpanModel, parts: Sequence[StepPart], exits: Sequence[StepExits | None]
) -> tuple[list[torch.Tensor], list[tuple[int, ...] | None]]:
    """Compute parts of steps of some blocks of a span. If it does not `joins_parts`, all need the same blocks.

    Returns:
        the outputs of each part, `[tokens, hidden]`; those of a token that left are its hidden states in front of the
        block where it did. And for each part with exits, where its tokens have left now.
    """
    offered = whole.exits if any(one is not None for one in exits) else None
    under_way = [_PartUnderWay(part, one, offered) for part, one in zip(parts, exits, strict=True)]
    if whole.can_fill:
        for piece in pass_pieces([part.span for part in parts], offered):
            here = [one for one in under_way if one.span.start <= piece.start and piece.end <= one.span.end]
            _fill_pieces(whole, piece.start, here)
            _compute_piece(whole.narrowed(piece), here)
            if offered is not None:
                _let_leave(offered, piece.end, here)
    else:
        outputs = compute_parts(whole.narrowed(parts[0].span), parts)
        for one, output in zip(under_way, outputs, strict=True):
            tokens = one.tokens(left=False)
            one.advance(output if tokens is None else output[tokens])
    return [one.hidden_TH for one in under_way], [
        tuple(one.left) if one.left is not None else None for one in under_way
    ]


def pass_pieces(spans: Collection[Span], exits: SpanExits | None) -> list[Span]:
    """Where a pass is cut: where steps join and leave it, and at the exits of their blocks. Pure.

    Args:
        spans: the blocks of each step.
        exits: where tokens may leave; None if none does.
    """
    pieces = [piece for span in set(spans) for piece in (exits.pieces(span) if exits is not None else (span,))]
    cuts = sorted({cut for piece in pieces for cut in (piece.start, piece.end)})
    bounds = (Span(start, end) for start, end in itertools.pairwise(cuts))
    return [one for one in bounds if any(span.start <= one.start and one.end <= span.end for span in spans)]


def _fill_pieces(whole: SpanModel, block: int, under_way: Sequence[_PartUnderWay]) -> None:
    """Fill each step's own piece that begins with this block, for tokens that have left."""
    gone: dict[Span, list[StepPart]] = {}
    for one in under_way:
        part = one.chosen_part(left=True)
        if part is not None:
            for piece in one.pieces:
                if piece.start == block:
                    gone.setdefault(piece, []).append(part)
    for piece, parts in gone.items():
        fill_parts(whole.narrowed(piece), parts)


def _compute_piece(piece: SpanModel, under_way: Sequence[_PartUnderWay]) -> None:
    """Compute one piece for tokens that have not left."""
    going = [(one, part) for one in under_way if (part := one.chosen_part(left=False)) is not None]
    if going:
        outputs = compute_parts(piece, [part for _, part in going])
        for (one, _), output in zip(going, outputs, strict=True):
            one.advance(output)


def _let_leave(exits: SpanExits, block: int, under_way: Sequence[_PartUnderWay]) -> None:
    """Let the tokens leave that are sure in front of a block. Each confidence is measured for all tokens at once."""
    asking: dict[ExitConfidence, list[tuple[_PartUnderWay, float]]] = {}
    for one in under_way:
        if one.terms is None or not exits.measures(one.terms.confidence, block):
            continue
        threshold = dict(one.terms.thresholds).get(block)
        if threshold is not None and threshold < 1 and one.tokens(left=False) != []:
            asking.setdefault(one.terms.confidence, []).append((one, threshold))
    for confidence, some in asking.items():
        before_RH = _joined([_chosen(one.before_TH, one.tokens(left=False)) for one, _ in some])
        hidden_RH = _joined([_chosen(one.hidden_TH, one.tokens(left=False)) for one, _ in some])
        values = exits.measure(confidence, block, before_RH, hidden_RH).tolist()
        for one, threshold in some:
            waiting = one.waiting()
            one.let_leave(block, {n for n, value in zip(waiting, values, strict=False) if value > threshold})
            values = values[len(waiting) :]


def _chosen(hidden_TH: torch.Tensor, tokens: list[int] | None) -> torch.Tensor:
    return hidden_TH if tokens is None else hidden_TH[tokens]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
