"""What every distributed language model has for early exit: training, saving and loading of lenses and classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from swarm.client.model.train_exits import ExitKind, ExitQuality, base_model, train_exits
from swarm.common import console
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
        progress: Callable[[int, int], object] | None = None,
    ) -> list[ExitQuality]:
        """Train what lets tokens leave early, on hidden states that the swarm computes, and use it from now on.

        Args:
            texts: token ids, in any number of tensors; about 40,000 tokens do for a small model.
            boundaries: blocks in front of which tokens may leave; by default those where servers begin or end now.
            kind: "lens" for maps by which the model's head can read early hidden states; "classifier" for what
                `EarlyExit(confidence="classifier")` asks, after the lenses.
            progress: is told how many parts of the work are done, and how many there are; by default, a bar on the
                terminal shows it, or lines in the log.

        Returns:
            for each boundary, what its tokens are worth.

        Raises:
            UsageError: there is not enough text, or no such boundary.
        """
        with ExitStack() as stack:
            if progress is None:
                progress = _ShownProgress(stack)
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


class _ShownProgress:
    """Shows how many parts of the training are done, until `stack` closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(console.progress_bar("Training exits", total, "part"))
        self._bar.update()
