"""Which successive steps of a session can wait and be computed as one, and how their tokens lie then. Pure.

Steps that just continue each other (the tokens of a text, one after the other) are what a prompt's chunk is: several
tokens for each sequence. Where reading the weights takes most of the time, computing them together costs little more
than computing one of them. This is the batched filling of EE-LLM, for steps instead of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.data_structures import StepLayout
from swarm.protocol.messages import StepRequest
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS

MAX_MERGED_TOKENS = 64
"""Tokens of steps that are computed as one: those of a short iteration. More would not be cheaper each."""


def is_urgent(step: StepRequest, block: int) -> bool:
    """Whether the client waits for the outputs of the blocks from `block` on: its token cannot leave before them."""
    return step.exit_block is None or block < step.exit_block


def may_wait(steps: Sequence[StepRequest], block: int, awaited: int) -> bool:
    """Whether steps that wait in front of `block` can wait for others, to be computed with them as one.

    Args:
        steps: that wait there, in order.
        awaited: number of the last step for which the client has said that it waits.
    """
    if any(step.exit_block != block or step.step <= awaited for step in steps):
        return False
    if not _is_plain(steps[0]) or mergeable(steps) < len(steps):
        return False
    longest = max(map(sum, zip(*(step.counts for step in steps), strict=True)))
    tokens = sum(sum(step.counts) for step in steps)
    return longest < MAX_SHORT_TOKENS and tokens + sum(steps[-1].counts) <= MAX_MERGED_TOKENS


def mergeable(steps: Sequence[StepRequest]) -> int:
    """How many of these steps, from the first on, can be computed as one if the first is right; at least 1.

    Together they are a short request like each of them: at most `MAX_SHORT_TOKENS` for each sequence.
    """
    first = steps[0]
    counts, total = first.counts, sum(first.counts)
    if not _is_plain(first):
        return 1
    for number, (before, step) in enumerate(itertools.pairwise(steps), 1):
        counts = [*map(sum, zip(counts, step.counts, strict=False))]
        total += sum(step.counts)
        if not _continues(before, step) or max(counts) > MAX_SHORT_TOKENS or total > MAX_MERGED_TOKENS:
            return number
    return len(steps)


def _is_plain(step: StepRequest) -> bool:
    """Whether it only appends tokens, which pass all blocks, and its lists match."""
    lists = [one for one in (step.starts, step.offsets, step.rope_lengths) if one is not None]
    special = step.sources is not None or step.exits is not None or step.left is not None
    return not special and bool(step.counts) and all(len(one) == len(step.counts) for one in lists)


def _continues(before: StepRequest, step: StepRequest) -> bool:
    """Whether a step goes on just where a plain one before it ends, in the same way."""
    return (
        _is_plain(step)
        and (step.step, step.epoch, step.follows) == (before.step + 1, before.epoch, None)
        and (step.format, step.dtype) == (before.format, before.dtype)
        and (step.offsets, step.rope_lengths) == (before.offsets, before.rope_lengths)
        and step.starts == [*map(sum, zip(before.starts, before.counts, strict=True))]
    )


@dataclass(frozen=True)
class MergedSteps:
    """Steps that `mergeable` allows to compute as one.

    Attributes:
        layout: where each sequence brings its tokens of all steps, one step after the other.
        rows: for each step, where its packed tokens lie among the packed tokens of `layout`.
    """

    layout: StepLayout
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, steps: Sequence[StepRequest]) -> MergedSteps:
        """How these steps are computed as one."""
        first = steps[0]
        rows: list[list[int]] = [[] for _ in steps]
        token = 0
        for sequence in range(len(first.counts)):
            for step, own in zip(steps, rows, strict=True):
                own += range(token, token + step.counts[sequence])
                token += step.counts[sequence]
        counts = tuple(sum(step.counts[sequence] for step in steps) for sequence in range(len(first.counts)))
        offsets = tuple(first.offsets) if first.offsets is not None else None
        lengths = tuple(first.rope_lengths) if first.rope_lengths is not None else None
        return cls(StepLayout(tuple(first.starts), counts, None, offsets, lengths), tuple(map(tuple, rows)))
