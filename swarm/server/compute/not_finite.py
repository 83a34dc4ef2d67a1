"""Says which block of a server computes NaN or infinity."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from swarm.common.dtypes import dtype_name, not_finite_help
from swarm.common.outcome import result_or_error
from swarm.data_structures import Span, StepLayout
from swarm.models.execution.session_cache import forward_without_cache
from swarm.models.execution.span_model import SpanModel

logger = logging.getLogger(__name__)


def warn_of_not_finite(model: SpanModel, inputs: Callable[[], torch.Tensor], layout: StepLayout) -> None:
    """Say which block makes NaN or infinity of the inputs of a session's first step: all are computed once more."""
    found, dtype = result_or_error(_first_block, model, inputs, layout), dtype_name(model.dtype)
    culprit = f"Block {found}" if isinstance(found, int) else f"One of the blocks {model.span}"
    logger.warning("%s computed NaN or infinity in %s from finite inputs; %s", culprit, dtype, not_finite_help(dtype))


def _first_block(model: SpanModel, inputs: Callable[[], torch.Tensor], layout: StepLayout) -> int | None:
    hidden = inputs().to(model.dtype)
    for block in range(model.span.start, model.span.end):
        part = model.narrowed(Span(block, block + 1))
        hidden = forward_without_cache(part, hidden, replace(layout, sources=None))
        if not bool(hidden.isfinite().all()):
            return block
    return None
