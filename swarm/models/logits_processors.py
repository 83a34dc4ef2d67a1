"""Which of transformers' logits processors a loop may use that processes a position more than once."""

from __future__ import annotations

from collections.abc import Iterable

from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

WITH_STATE = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""What these make of scores depends on their earlier calls. The others for texts go by what they are given alone."""


def processors_with_state(processors: Iterable[object]) -> list[str]:
    """The names of those that count on one call for each position, in order."""
    return [type(one).__name__ for one in processors if isinstance(one, WITH_STATE)]
