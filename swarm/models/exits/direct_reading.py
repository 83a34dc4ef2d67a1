"""Reading hidden states by those calls of a model's forward alone that depend on them: final norm, head, and what the
family does to logits.

The forward of a family's model also embeds tokens, builds masks and positions, and asks its config many things. Where
early hidden states are read for every token, that takes several times as long as norm and head of a small model. So the
forward is traced, and later ones make only the calls that the logits need. No family is known here: the forward stays
the reference, and a trace counts only if it gives the same logits, bit for bit, for hidden states other than those with
which it was made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from swarm.models.tracing import NotTraceable, Recorder, trace

logger = logging.getLogger(__name__)

Reading = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states behind the last block, or as if they were, to logits, in inference."""


class DirectReading:
    """A reading that computes only what depends on hidden states, as far as that gives the same logits.

    Not for hidden states that require gradients.

    Args:
        whole: a model's forward, for any number of rows in front. Weights may change, but stay the same tensors.
        alone: in which forwards are traced and compared: nothing of them may be computed by another thread.
    """

    def __init__(self, whole: Reading, alone: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._whole, self._alone = whole, alone
        self._traced: dict[tuple[torch.Size, torch.dtype, torch.device], Reading] = {}
        """For each form of a row."""
        self._readings: dict[tuple[torch.Size, torch.dtype, torch.device], Reading] = {}
        """For each shape, after a comparison."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        reading = self.prepare(hidden)
        with torch.no_grad():
            return reading(hidden)

    def prepare(self, hidden: torch.Tensor) -> Reading:
        """How hidden states like these are read, which takes a forward to find out at first."""
        key = (hidden.shape, hidden.dtype, hidden.device)
        if key not in self._readings:
            with self._alone(), torch.no_grad():
                self._readings[key] = self._chosen(hidden)
        return self._readings[key]

    def _chosen(self, hidden: torch.Tensor) -> Reading:
        """The trace, or the whole forward if that reads hidden states like these in another way."""
        key = (hidden.shape[1:], hidden.dtype, hidden.device)
        if key not in self._traced:
            self._traced[key] = trace_reading(self._whole, hidden)
        traced = self._traced[key]
        return traced if traced is self._whole or torch.equal(traced(hidden), self._whole(hidden)) else self._whole


def trace_reading(whole: Reading, like: torch.Tensor) -> Reading:
    """The calls of a forward that its logits need, or the forward itself if it cannot be traced.

    Args:
        like: hidden states of the form for which it is traced, of any number of rows.
    """

    def make_inputs(rows: int) -> tuple[torch.Tensor]:
        shape = (rows, *like.shape[1:])  # and no random numbers: a text that is sampled would be another one
        return (torch.linspace(-1, 1, math.prod(shape), device=like.device).view(shape).to(like.dtype),)

    def forward(recorder: Recorder, hidden: torch.Tensor) -> torch.Tensor:
        return whole(hidden)

    try:
        return trace(forward, make_inputs).function()
    except NotTraceable as error:
        logger.debug("hidden states are read with the whole forward: %s", error)
        return whole
