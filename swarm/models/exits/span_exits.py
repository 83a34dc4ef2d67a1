"""Where tokens may leave a span, how sure they are there, and which of them leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from swarm.data_structures import ExitBatchRule, ExitConfidence, ExitThresholds, Span
from swarm.models.exits.confidence import softmax_response, state_similarity
from swarm.models.exits.trained_exits import BaseModel, TrainedExits

HEAD_TOKENS = 64
"""Tokens whose logits are in memory at once."""

NOTHING_TRAINED = TrainedExits(BaseModel("", "", 0, 0))


@dataclass(frozen=True, eq=False)
class SpanExits:
    """The exits of a span.

    Attributes:
        blocks: in front of which tokens may leave, ascending.
        head: hidden states `[R, H]` to logits `[R, V]`: final norm and head; None if they are not loaded.
        trained: lenses, which the head reads through, and classifiers.
        head_bytes: weights that the head reads, which say what reading costs.
    """

    blocks: tuple[int, ...]
    head: Callable[[torch.Tensor], torch.Tensor] | None = None
    trained: TrainedExits = NOTHING_TRAINED
    head_bytes: int = 0

    @property
    def confidences(self) -> tuple[ExitConfidence, ...]:
        """What can be measured at some of these blocks."""
        found: list[ExitConfidence] = ["similarity"]
        if self.head is not None:
            found.append("softmax")
        if any(block in self.trained.classifiers for block in self.blocks):
            found.append("classifier")
        return tuple(found) if self.blocks else ()

    def measures(self, confidence: ExitConfidence, block: int) -> bool:
        """Whether this confidence can be measured in front of this block."""
        if block not in self.blocks:
            return False
        if confidence == "classifier":
            return block in self.trained.classifiers
        return confidence == "similarity" or self.head is not None

    def readings(self, terms: ExitThresholds, span: Span) -> int:
        """How often the head reads a token inside these blocks, or behind them, at most."""
        if terms.confidence != "softmax":
            return 0
        return sum(
            span.start < block <= span.end and threshold < 1 and self.measures(terms.confidence, block)
            for block, threshold in terms.thresholds
        )

    def applies(self, terms: ExitThresholds, span: Span) -> bool:
        """Whether these terms can let a token leave inside these blocks, or behind them. If not, they need no cuts."""
        return any(
            span.start < block <= span.end and threshold < 1 and self.measures(terms.confidence, block)
            for block, threshold in terms.thresholds
        )

    def pieces(self, span: Span) -> list[Span]:
        """A part of the span, cut where hidden states are looked at."""
        return cut_at_exits(span, self.blocks)

    def measure(
        self, confidence: ExitConfidence, block: int, before_RH: torch.Tensor, hidden_RH: torch.Tensor
    ) -> torch.Tensor:
        """How sure tokens are of their successors, `[R]` float32, for a confidence that `measures` allows.

        Args:
            before_RH: hidden states in front of block `block - 1`.
            hidden_RH: hidden states in front of `block`.
        """
        if confidence == "similarity":
            return state_similarity(before_RH, hidden_RH)
        if confidence == "classifier":
            return self.trained.classifiers[block](hidden_RH)
        assert self.head is not None
        lens, head = self.trained.lenses.get(block), self.head
        # Logits are large: those of a few tokens at once.
        return torch.cat(
            [
                softmax_response(head(lens(rows_RH) if lens is not None else rows_RH))
                for rows_RH in hidden_RH.split(HEAD_TOKENS)
            ]
        )


def sequences_that_leave(rule: ExitBatchRule, waiting: Sequence[int], sure: Collection[int]) -> list[int]:
    """The sequences that leave now.

    Args:
        rule: "row" lets each sequence leave by itself. "all" lets the batch leave once each of its sequences has been
            sure, here or in front of a block before ("An Efficient Inference Framework for Early-exit LLMs", algorithm
            1).
        waiting: numbers of the sequences that have not left.
        sure: those that are sure; for "all", those that have been sure anywhere so far.
    """
    if rule == "all":
        return list(waiting) if all(number in sure for number in waiting) else []
    return [number for number in waiting if number in sure]


def cut_at_exits(span: Span, exits: Collection[int]) -> list[Span]:
    """The span in pieces, so that each exit has hidden states in front of it and in front of the block before it.

    The latter are what state similarity compares with. The piece that ends at an exit has one block.
    """
    cuts = {cut for block in exits for cut in (block - 1, block) if span.start < cut < span.end}
    return [Span(start, end) for start, end in pairwise([span.start, *sorted(cuts), span.end])]
