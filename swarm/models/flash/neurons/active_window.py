"""Which neurons of a block stay in memory: those of the last tokens, as many tokens back as memory has room for.

"LLM in a flash", section 3.1, keeps the neurons of the last k tokens and makes k as large as memory allows. Here k is
not chosen: memory is, and what was needed longest ago leaves when something else needs the place. That is the paper's
window, with a k that follows the text, and it needs no idea of sessions: sessions that take turns share neurons, and a
session's own last token is still there after all others had a turn, while a window of k forwards would have dropped it.
The paper's fixed window is there for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.models.flash.neurons.neuron_matrix import ABSENT, NeuronMatrix
from swarm.models.flash.records.record_buffer import Indices

NEVER = -1
"""The forward that last needed a neuron which none did, or whose need is not expected to come again."""

EXPECTED_ACCEPTED = 0.5
"""Share of a sequence's candidate tokens that speculation is expected to accept."""


@dataclass(frozen=True)
class Portion:
    """Neurons that are computed at once, because memory has room for them together.

    Attributes:
        needed: all of them, sorted.
        joining: those to read first, sorted.
        leaving: neurons in memory that make room.
    """

    needed: Indices
    joining: Indices
    leaving: Indices


class ActiveWindow:
    """Decides what joins and leaves a matrix; the caller does it.

    Args:
        matrix: the neurons in memory.
        forwards: keep the neurons of so many forwards and no others (the paper's k, for benchmarks). None: as many as
            there is room for.

    Attributes:
        last_k_active: `[neurons]` int64: the number of the forward that needed a neuron last (the paper's field), or
            `NEVER`.
    """

    def __init__(self, matrix: NeuronMatrix, forwards: int | None = None) -> None:
        self._matrix = matrix
        self._forwards = forwards
        self._forward = 0
        self.last_k_active: Indices = np.full(len(matrix.row_of), NEVER)

    def portions(self, needed: Indices, kept: Indices | None = None) -> Iterator[Portion]:
        """What a forward needs, cut into portions that fit into memory; more than one only if memory is too small.

        The caller makes each portion's changes and computes with it before it takes the next one. What is in memory
        already comes first, so that nothing is read twice.

        Args:
            needed: neurons, sorted.
            kept: those of them that later forwards are expected to need as well (see `ForwardTokens`); None for all.
        """
        self._forward += 1
        self.last_k_active[needed if kept is None else kept] = self._forward
        capacity = self._matrix.capacity
        if len(needed) <= capacity:
            yield self._portion(needed)
            return
        is_there = self._matrix.row_of[needed] != ABSENT
        ordered = np.concatenate([needed[is_there], needed[~is_there]])
        for start in range(0, len(ordered), capacity):
            yield self._portion(np.sort(ordered[start : start + capacity]))

    def _portion(self, needed: Indices) -> Portion:
        matrix = self._matrix
        joining = matrix.missing(needed)
        is_other = np.ones(len(matrix.row_of), dtype=bool)
        is_other[needed] = False
        others = matrix.neurons[is_other[matrix.neurons]]
        last_active = self.last_k_active[others]
        leaves = np.zeros(len(others), dtype=bool)
        if self._forwards is not None:
            leaves = last_active <= self._forward - self._forwards
        excess = matrix.num_used - int(leaves.sum()) + len(joining) - matrix.capacity
        if excess > 0:
            last_active = np.where(leaves, np.iinfo(np.int64).max, last_active)
            leaves[np.argpartition(last_active, excess - 1)[:excess]] = True
        return Portion(needed, joining, others[leaves])


@dataclass
class ForwardTokens:
    """Which tokens of the forward in progress belong to one sequence, for the window and for nothing else.

    Attributes:
        counts: tokens of each sequence of the forward, in order; None if each is a sequence's next token.
        accepted: share of a sequence's tokens that are expected to be accepted.
    """

    counts: Sequence[int] | None = None
    accepted: float = EXPECTED_ACCEPTED

    def expected(self, tokens: int) -> np.ndarray | None:
        """The tokens of which the window keeps neurons, `[tokens]` bool; None for all.

        With speculation, the window ends at the expected accepted token (section 5.2): neurons that only later
        candidates need are read for this forward, and are the first to leave.
        """
        if self.counts is None or sum(self.counts) != tokens:
            return None
        counts = np.asarray(self.counts, dtype=np.int64)
        place = np.arange(tokens) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(place < np.ceil(self.accepted * np.repeat(counts, counts)))
