"""What `generate(..., early_exit=swarm.EarlyExit(...))` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from swarm.data_structures import ExitBatchRule, ExitConfidence
from swarm.errors import UsageError

ExitFill = Literal["exact", "project"]
"""What the caches of skipped blocks get. exact: nothing is skipped, later blocks compute the token as well, and caches
are those of the full model. project: keys and values that follow from the hidden state with which the token left."""


@dataclass(frozen=True)
class EarlyExit:
    """When tokens leave before the last block ("An Efficient Inference Framework for Early-exit LLMs", section 2.1).

    A token may leave between two servers of the route, because this client receives a copy of each server's outputs.
    With `fill="project"` it may also leave inside the span of a server that was started with exits. That server and
    those behind then skip their other blocks.

    Attributes:
        confidence: how to measure how sure a token is.
        threshold: a token leaves if its confidence is above it; from 0 (nearly always) to 1 (never). One number, or one
            for each block in front of which a token may leave (from 1 on).
        decay: how quickly the threshold falls along the text to nine tenths of its value (CALM's tau); 0 for never.
        verify: lossless: a token is handed out when the last server has confirmed it, and what follows a wrong one is
            given up. Without it the early token stands, and the text is approximate.
        batch: which sequences of a batch leave together. With "row" and `fill="exact"`, each prompt has a session of
            its own; the sequences that `num_return_sequences` makes of one prompt share it, and leave together.
        fill: what the caches of blocks that a token skips get. "project" saves computing, and is approximate; it needs
            `verify=False`.
        min_block, max_block: blocks that a token passes at least, and behind which it no longer leaves.

    Raises:
        UsageError: a value is not possible.
    """

    confidence: ExitConfidence = "softmax"
    threshold: float | Mapping[int, float] = 0.9
    decay: float = 0.0
    verify: bool = True
    batch: ExitBatchRule = "row"
    fill: ExitFill = "exact"
    min_block: int = 1
    max_block: int | None = None

    def __post_init__(self) -> None:
        if self.confidence not in get_args(ExitConfidence):
            raise UsageError(f"confidence={self.confidence!r} is not one of {', '.join(get_args(ExitConfidence))}")
        if self.batch not in get_args(ExitBatchRule):
            raise UsageError(f"batch={self.batch!r} is not one of {', '.join(get_args(ExitBatchRule))}")
        if self.fill not in get_args(ExitFill):
            raise UsageError(f"fill={self.fill!r} is not one of {', '.join(get_args(ExitFill))}")
        if self.fill == "project" and self.verify:
            raise UsageError(
                "fill='project' needs verify=False: blocks that a token skips never compute it, so that there is no "
                "full model's answer with which to verify it"
            )
        given = self.threshold if isinstance(self.threshold, Mapping) else {0: self.threshold}
        if not given or not all(_is_number(one) and 0 <= one <= 1 for one in given.values()):
            raise UsageError(f"threshold={self.threshold!r}: a confidence lies between 0 and 1")
        if isinstance(self.threshold, Mapping) and not all(map(_is_block, self.threshold)):
            raise UsageError(
                f"threshold={self.threshold!r}: the keys are numbers of blocks in front of which a token may leave; "
                "use integers from 1 on"
            )
        if not _is_number(self.decay) or self.decay < 0:
            raise UsageError(f"decay={self.decay!r}: use 0 for no decay, or a positive number")
        if self.min_block < 1:
            raise UsageError(f"min_block={self.min_block}: a token passes at least one block; use 1 or more")
        if self.max_block is not None and self.max_block < self.min_block:
            raise UsageError(
                f"min_block={self.min_block}, max_block={self.max_block}: no block lies between the two; use a larger "
                "max_block, or leave it out"
            )

    @property
    def needs_sessions(self) -> bool:
        """Whether each sequence of a batch needs a session of its own. Servers let sequences leave by themselves."""
        return self.batch == "row" and self.fill == "exact"

    @property
    def leaves_by_row(self) -> bool:
        """Whether the sequences of one session leave by themselves."""
        return self.batch == "row" and self.fill == "project"

    def threshold_at(self, block: int) -> float | None:
        """The threshold for tokens in front of `block`; None if they may not leave there."""
        if block < self.min_block or (self.max_block is not None and block > self.max_block):
            return None
        if isinstance(self.threshold, Mapping):
            return self.threshold.get(block)
        return self.threshold

    def may_leave_at(self, block: int) -> bool:
        """Whether tokens may leave in front of `block`. No confidence is above 1, but a threshold of 1 may fall."""
        threshold = self.threshold_at(block)
        return threshold is not None and (threshold < 1 or self.decay > 0)

    def first_exit(self, boundaries: Sequence[int]) -> int | None:
        """The first of these blocks in front of which a token may leave; None if it has to pass them all."""
        return next(filter(self.may_leave_at, boundaries), None)

    def looked_at(self, boundaries: Sequence[int]) -> list[int]:
        """Those of these blocks in front of which a token has to be looked at, to see whether it leaves."""
        if self.fill == "project":  # it may have left inside the span before
            return list(boundaries)
        # A hidden state is compared with that in front of the block before.
        following = [*boundaries[1:], None] if self.confidence == "similarity" else [None] * len(boundaries)
        return [
            block
            for block, after in zip(boundaries, following, strict=True)
            if self.may_leave_at(block) or (after is not None and self.may_leave_at(after))
        ]


def _is_block(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
