"""What a window over neurons reads, played with the neurons that a text's tokens select.

A trace is `[forwards, neurons]` bool, one forward after the other. `reads` plays it through the window that serves,
`fewest_reads` through the best possible one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarm.models.flash.neurons.active_window import ActiveWindow
from swarm.models.flash.neurons.neuron_matrix import ABSENT
from swarm.models.flash.records.record_buffer import Indices

MEMORY_SHARES = tuple(eighths / 8 for eighths in range(1, 8))
"""Shares of the neurons that memory has room for, for which reads are measured."""

WARM_UP_SHARE = 0.25
"""Of a trace, whose reads are not counted: memory is empty only once."""


def reads(trace_FN: np.ndarray, slots: int, window_forwards: int | None = None) -> np.ndarray:
    """Number of neurons that are read for each forward, `[forwards]`.

    Args:
        slots: neurons that memory has room for.
        window_forwards: the paper's fixed window, see `ActiveWindow`. As many as the trace has: what was needed longest
            ago leaves.
    """
    held = _Held(trace_FN.shape[1], slots)
    window = ActiveWindow(held, window_forwards)
    counts = np.zeros(len(trace_FN), dtype=np.int64)
    for number, needed_N in enumerate(trace_FN):
        for portion in window.portions(np.flatnonzero(needed_N)):
            held.change(portion.leaving, portion.joining)
            counts[number] += len(portion.joining)
    return counts


def fewest_reads(trace_FN: np.ndarray, slots: int) -> np.ndarray:
    """Number of neurons that the best possible window reads for each forward, `[forwards]`: Belady's optimum.

    Among those that the forward does not need, the ones that are needed again last make room. Where a forward needs
    more than there is room for, the rest is read and leaves at once.
    """
    forwards, neurons = trace_FN.shape
    next_use_FN = np.full((forwards + 1, neurons), forwards, dtype=np.int32)
    for number in range(forwards - 1, -1, -1):
        next_use_FN[number] = np.where(trace_FN[number], number, next_use_FN[number + 1])
    counts = np.zeros(forwards, dtype=np.int64)
    held_N = np.zeros(neurons, dtype=bool)
    for number, needed_N in enumerate(trace_FN):
        counts[number] = (needed_N & ~held_N).sum()
        candidates = np.flatnonzero(needed_N | held_N)
        later = next_use_FN[number + 1, candidates]
        stays = candidates[np.lexsort((later, ~needed_N[candidates]))][:slots]
        held_N[:] = False
        held_N[stays] = True
    return counts


def measured_reads(
    selected_RTN: np.ndarray, sessions: Sequence[int], shares: Sequence[float] = MEMORY_SHARES
) -> dict[int, tuple[tuple[float, float], ...]]:
    """What `Sparsity.reads` holds: for each number of sessions and each share in memory, the share that is read.

    Args:
        selected_RTN: of each token of each sequence, `[sequences, tokens, neurons]` bool.
        sessions: numbers of sequences that are computed together, one token of each; those of which there are too few
            sequences are left out.
    """
    sequences, _, neurons = selected_RTN.shape
    found = {}
    for count in sessions:
        if count > sequences:
            continue
        groups = selected_RTN[: sequences // count * count].reshape(-1, count, *selected_RTN.shape[1:])
        trace_FN = groups.any(1).reshape(-1, neurons)
        counted = slice(int(len(trace_FN) * WARM_UP_SHARE), None)
        read = [
            min(1.0, float(reads(trace_FN, max(1, int(share * neurons)))[counted].mean()) / neurons) for share in shares
        ]
        # More memory reads more for some traces, which says nothing about the next one.
        found[count] = tuple(zip(shares, np.minimum.accumulate(read).tolist(), strict=True))
    return found


class _Held:
    """Which neurons are in memory, without their weights."""

    def __init__(self, neurons: int, capacity: int) -> None:
        self.row_of: Indices = np.full(neurons, ABSENT)
        self.capacity = capacity
        self.neurons: Indices = np.zeros(0, dtype=np.int64)

    @property
    def num_used(self) -> int:
        return len(self.neurons)

    def change(self, leaving: Indices, joining: Indices) -> None:
        self.row_of[leaving] = ABSENT
        self.row_of[joining] = 0
        self.neurons = np.flatnonzero(self.row_of != ABSENT)
