"""A step of a session that was sent off without waiting for what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepUnderWay:
    """A step that was sent off and is not settled.

    Attributes:
        number: its number in the session.
        before: slots of each sequence before it.
        hidden: what went into the blocks, `[sequences, slots, hidden_size]`.
        real: mask of the slots that hold tokens; None if all do.
    """

    number: int
    before: int
    hidden: torch.Tensor
    real: torch.Tensor | None
