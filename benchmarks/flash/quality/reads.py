"""What models read for a token, by the rule that decides which neurons stay in memory; for `benchmarks.flash.quality`.

The selections of the default predictors, on text that nothing was made with, are played through each rule. Sessions
take turns, a token of each after the other. The last column divides the memory among layers as a server does, by what
two tokens need; the others give each layer the same share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.common.tables import table
from benchmarks.flash.least_recently_used import LeastRecentlyUsed
from benchmarks.flash.quality.methods import Observed, Subject, computed_with, sequences_of
from swarm.models.flash.memory_shares import NeuronNeed, divide_neurons
from swarm.models.flash.neurons.active_window import ActiveWindow
from swarm.models.flash.neurons.neuron_matrix import ABSENT
from swarm.models.flash.neurons.predictor_training import make_predictor
from swarm.models.flash.records import Indices
from swarm.models.flash.stay_priority import StayPriority

WARM_UP_SHARE = 0.25
"""Of a trace, whose reads are not counted: memory is empty only once."""

SHARES = (0.25, 0.5)
SESSIONS = (1, 4)
HEADING = (
    "neurons in memory",
    "sessions",
    "best possible",
    "longest ago leaves",
    "most rarely leaves",
    "the same, memory divided",
)


@torch.no_grad()
def reads_table(subject: Subject) -> str:
    """Shares of all neurons that are read for a token."""
    made = [make_predictor(layer.dense, layer.inputs_RTH) for layer in subject.layers]
    observed = [Observed(one.predictor, layer.dense) for one, layer in zip(made, subject.layers, strict=True)]
    with computed_with(subject.layers, observed):
        subject.perplexity()
    traces = [sequences_of(one, len(subject.held_out)).numpy() for one in observed]
    return table(HEADING, rows(traces, [one.two_tokens for one in made]))


def rows(traces: Sequence[np.ndarray], two_tokens: Sequence[float]) -> list[list[str]]:
    """Rows of the table.

    Args:
        traces: of each layer, what is selected: `[sequences, tokens, neurons]` bool.
        two_tokens: share of each layer's neurons that two tokens need, by which memory is divided.
    """
    layers = [NeuronNeed(trace.shape[2], 1, needed) for trace, needed in zip(traces, two_tokens, strict=True)]
    neurons = sum(layer.count for layer in layers)
    found = []
    for share in SHARES:
        equal, divided = [int(share * layer.count) for layer in layers], divide_neurons(int(share * neurons), layers)
        for sessions in SESSIONS:
            ordered = [in_turns(trace, sessions) for trace in traces]
            least = _mean(fewest_reads, ordered, equal)
            shares = [
                least,
                _mean(
                    lambda trace, slots: neurons_read(trace, slots, LeastRecentlyUsed(1, trace.shape[1])),
                    ordered,
                    equal,
                ),
                _mean(neurons_read, ordered, equal),
                _mean(neurons_read, ordered, divided),
            ]
            cells = [f"{one / neurons:.2%} ({one / least:.2f})" for one in shares]
            found.append([f"{share:.0%}", str(sessions), *cells])
    return found


def in_turns(trace_RTN: np.ndarray, sessions: int) -> np.ndarray:
    """The forwards of so many sequences that take turns, then those of the next ones: `[forwards, neurons]`."""
    sequences, _, neurons = trace_RTN.shape
    groups = trace_RTN[: sequences // sessions * sessions].reshape(-1, sessions, *trace_RTN.shape[1:])
    return groups.swapaxes(1, 2).reshape(-1, neurons)


def _mean(rule: Callable[[np.ndarray, int], np.ndarray], traces: Sequence[np.ndarray], slots: Sequence[int]) -> float:
    """Neurons that are read for a forward in all layers together, after the first part of the text."""
    return sum(
        float(rule(trace, room)[int(WARM_UP_SHARE * len(trace)) :].mean())
        for trace, room in zip(traces, slots, strict=True)
    )


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


def neurons_read(trace_FN: np.ndarray, slots: int, rule: StayPriority | None = None) -> np.ndarray:
    """Number of neurons that an `ActiveWindow` reads for each forward, `[forwards]`.

    Args:
        trace_FN: neurons that are needed, one forward after the other, `[forwards, neurons]` bool.
        slots: neurons that memory has room for.
        rule: see `ActiveWindow`.
    """
    held = _Held(trace_FN.shape[1], slots)
    window = ActiveWindow(held, rule)
    counts = np.zeros(len(trace_FN), dtype=np.int64)
    for number, needed_N in enumerate(trace_FN):
        for portion in window.portions(np.flatnonzero(needed_N)):
            held.change(portion.leaving, portion.joining)
            counts[number] += len(portion.joining)
    return counts


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
