"""What every distributed language model has for early exit: training, saving and loading of lenses and classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from swarm.client.model.train_exits import ExitKind, ExitQuality, base_model, train_exits
from swarm.errors import UsageError
from swarm.models.exits.trained_exits import TrainedExits


class ExitsMixin:
    """Mixin of models whose tokens may leave early.

    Attributes:
        exits: lenses and classifiers with which they do; None if nothing was trained or loaded.
    """

    exits: TrainedExits | None = None

    def train_exits(
        self,
        texts: Sequence[torch.Tensor],
        *,
        boundaries: Sequence[int] | None = None,
        kind: ExitKind = "lens",
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> list[ExitQuality]:
        """Train what lets tokens leave early, on hidden states that the swarm computes, and use it from now on.

        Args:
            texts: token ids, in any number of tensors; about 40,000 tokens do for a small model.
            boundaries: blocks in front of which tokens may leave; by default those where servers begin or end now.
            kind: "lens" for maps by which the model's head can read early hidden states; "classifier" for what
                `EarlyExit(confidence="classifier")` asks, after the lenses.
            progress: is told how many batches are done, and how many there are.

        Returns:
            for each boundary, what its tokens are worth.

        Raises:
            UsageError: there is not enough text, or no such boundary.
        """
        exits, quality = train_exits(self, texts, boundaries, kind, progress)
        self._use(exits)
        return quality

    def save_exits(self, folder: str | Path) -> None:
        """Write what `train_exits` made into `folder`. Raises `UsageError` if there is nothing."""
        if self.exits is None:
            raise UsageError("nothing was trained: call model.train_exits first")
        self.exits.save(folder)

    def load_exits(self, folder: str | Path) -> None:
        """Read what `save_exits` wrote. Raises `AdapterMismatch` or `AdapterError`."""
        self._use(TrainedExits.load(folder, base_model(self)))

    def _use(self, exits: TrainedExits) -> None:
        """Keep them where the model's head is, so that `generate` need not copy them each time."""
        object.__setattr__(self, "exits", exits.to(self.device))  # type: ignore[attr-defined]
