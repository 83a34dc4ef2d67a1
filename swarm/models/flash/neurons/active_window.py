"""Which neurons of a block stay in memory: those that forwards need most often.

"LLM in a flash", section 3.1, keeps the neurons of the last k tokens and makes k as large as memory allows. Here k is
not chosen: memory is, and when something else needs the place, what was needed most rarely leaves, where a need counts
half after 64 forwards. That reads less than any window, and it needs no idea of sessions: those that take turns share
neurons, and a session's own are still there after all others had a turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm.models.flash.neurons.neuron_matrix import ABSENT
from swarm.models.flash.records import Indices
from swarm.models.flash.stay_priority import DecayedFrequency, StayPriority

EXPECTED_ACCEPTED = 0.5
"""Share of a sequence's candidate tokens that speculation is expected to accept."""


class ResidentNeurons(Protocol):
    """What decisions need to know of a `NeuronMatrix`, where the attributes are explained."""

    row_of: Indices

    @property
    def capacity(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def neurons(self) -> Indices: ...


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
        rule: decides which neurons leave; None for the rule that serves.
    """

    def __init__(self, matrix: ResidentNeurons, rule: StayPriority | None = None) -> None:
        self._matrix = matrix
        self._rule = DecayedFrequency(1, len(matrix.row_of)) if rule is None else rule

    @property
    def priority(self) -> np.ndarray:
        """`[neurons]` float64: what has the lowest number leaves first; zero was never needed."""
        priority_N: np.ndarray = self._rule.priority_BE[0]
        return priority_N

    def portions(self, needed: Indices, kept: Indices | None = None) -> Iterator[Portion]:
        """What a forward needs, cut into portions that fit into memory; more than one only if memory is too small.

        The caller makes each portion's changes and computes with it before it takes the next one. What is in memory
        already comes first, so that nothing is read twice.

        Args:
            needed: neurons, sorted.
            kept: those of them that later forwards are expected to need as well (see `ForwardTokens`); None for all.
        """
        noted = needed if kept is None else kept
        self._rule.note_use(0, noted, np.ones(len(noted)), 1)
        capacity = self._matrix.capacity
        if len(needed) <= capacity:
            yield self._portion(needed)
            return
        is_there = self._matrix.row_of[needed] != ABSENT
        ordered = np.concatenate([needed[is_there], needed[~is_there]])
        for start in range(0, len(ordered), capacity):
            yield self._portion(np.sort(ordered[start : start + capacity]))

    def while_all_pass(self, needed: Indices, shares: np.ndarray, tokens: int) -> Portion:
        """What joins and leaves when all neurons are read anyway, as they are for a prompt: afterwards, memory holds
        those that are needed most often, whether or not they were needed now.

        Args:
            needed: by the last tokens of the prompt, sorted.
            shares: for each of them, the share of these tokens that needs it.
            tokens: how many.
        """
        self._rule.note_use(0, needed, shares, tokens)
        worthwhile = np.flatnonzero(self.priority)
        excess = len(worthwhile) - self._matrix.capacity
        if excess > 0:
            worthwhile = np.sort(worthwhile[np.argpartition(self.priority[worthwhile], excess - 1)[excess:]])
        return self._portion(worthwhile)

    def _portion(self, needed: Indices) -> Portion:
        matrix = self._matrix
        joining = needed[matrix.row_of[needed] == ABSENT]
        is_other = np.ones(len(matrix.row_of), dtype=bool)
        is_other[needed] = False
        others = matrix.neurons[is_other[matrix.neurons]]
        excess = matrix.num_used + len(joining) - matrix.capacity
        if excess <= 0:
            return Portion(needed, joining, others[:0])
        return Portion(needed, joining, others[np.argpartition(self.priority[others], excess - 1)[:excess]])


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
