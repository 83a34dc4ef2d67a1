"""Which sequences of a step leave in front of a block, and where a span is cut for that. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from swarm.data_structures import ExitBatchRule, Span


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
