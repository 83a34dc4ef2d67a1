"""What sparse layers selected, read and missed, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class NeuronCounters:
    """Sums since the layer was made.

    Attributes:
        neurons: of the layer.
        forwards, tokens: computed with selected neurons.
        selected: neurons selected for tokens, summed over tokens.
        needed: neurons selected for at least one token of a forward, summed over forwards.
        read: those of them that were not in memory.
        portions: more than `forwards` if memory was too small for what a forward needed.
        exact_tokens: tokens that were computed with all neurons.
        sampled_active: active neurons of tokens of exact forwards, which the predictor was asked about.
        sampled_missed: those of them that it would not have selected.
    """

    neurons: int
    forwards: int = 0
    tokens: int = 0
    selected: int = 0
    needed: int = 0
    read: int = 0
    portions: int = 0
    exact_tokens: int = 0
    sampled_active: int = 0
    sampled_missed: int = 0

    @property
    def hits(self) -> float:
        """Share of the needed neurons that were in memory."""
        return 1 - self.read / self.needed if self.needed else 1.0

    @property
    def recall(self) -> float:
        """Share of the active neurons that the predictor selects, as sampled."""
        return 1 - self.sampled_missed / self.sampled_active if self.sampled_active else 1.0

    def count_forward(self, selected_TN: torch.Tensor, needed: int) -> None:
        self.forwards += 1
        self.tokens += len(selected_TN)
        self.selected += int(selected_TN.sum())
        self.needed += needed

    def count_sample(self, selected_TN: torch.Tensor, values_TN: torch.Tensor) -> None:
        """Compare what the predictor selects with the values of the same neurons."""
        active_TN = values_TN != 0
        self.sampled_active += int(active_TN.sum())
        self.sampled_missed += int((active_TN & ~selected_TN).sum())
