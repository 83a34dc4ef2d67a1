"""How the pieces of a span are computed between which tokens leave, and how skipped blocks are filled."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from swarm.common.trials import Timing, attempt, is_faster
from swarm.data_structures import StepLayout
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.execution.tracing.traced_fill import traced_fill
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.execution.trials.trial_runs import FORWARD_TOLERANCE, decode_step

logger = logging.getLogger(__name__)

SKIPS_ALL = StepExits(None, (1,))
"""A step of a token that left before."""


def choose_exit_forwards(model: SpanModel, compile_in: Path | None = None) -> None:
    """Choose how the pieces of a span are computed, between which tokens leave, and how they are filled.

    Args:
        compile_in: see `choose_forward`; each piece takes as long as a span. Without, each is a part as all others.
    """
    recorder = model.strategy.graph_recorder
    for piece in model.pieces():
        if piece is not model:
            chosen = piece.with_strategy(replace(piece.strategy, graph_recorder=recorder))
            if compile_in is not None:
                chosen = choose_forward(piece, compile_in, recorder, model.strategy.layout)
            filling, _ = attempt("A traced fill", partial(_try_traced_fill, chosen))
            model.use_part(filling or chosen)


def _try_traced_fill(model: SpanModel) -> SpanModel | None:
    """A model with a traced fill, if it is right and faster."""
    candidate = model.with_strategy(replace(model.strategy, traced_fill=traced_fill(model)))
    expected, found = _behind_a_fill(model), _behind_a_fill(candidate)
    error = float((found - expected).norm() / expected.norm())
    if error < FORWARD_TOLERANCE[model.dtype] and _fills_faster(candidate, model):
        return candidate
    logger.debug("A traced fill is not better: relative error %.1e", error)
    return None


def _behind_a_fill(model: SpanModel) -> torch.Tensor:
    """Outputs of a token that sees filled keys and values, `[1, hidden]`."""
    generator = torch.Generator().manual_seed(0)
    cache = SessionCache(model)
    for start, tokens, left in ((0, 9, False), (9, 1, True), (10, 1, False)):
        hidden = torch.randn(tokens, model.hidden_size, generator=generator).to(model.device, model.dtype)
        step = cache.start_step(hidden, StepLayout((start,), (tokens,)), SKIPS_ALL if left else None)
        advance_steps([(step, tokens)])
        step.commit()
    return step.output.float()


def _fills_faster(model: SpanModel, other: SpanModel) -> Timing:
    """Whether filling for a token takes less time in `model` than in `other`."""
    steps = decode_step(model, SKIPS_ALL), decode_step(other, SKIPS_ALL)
    return is_faster(*steps, clock=time.perf_counter) if model.device.type == "cuda" else is_faster(*steps)
