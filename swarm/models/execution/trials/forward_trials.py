"""Which forward of packed tokens is right and the fastest for some loaded blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from swarm.common.trials import NotBetter, Timing, Trial, attempt, is_faster
from swarm.models.execution.cuda_graphs import CudaGraphRecorder, GraphRecorder
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ForwardKind
from swarm.models.execution.tracing.flat_forward import FlatForward
from swarm.models.execution.tracing.traced_forward import TokenForward, TracedForward
from swarm.models.execution.trials.layout_trials import LayoutRequest
from swarm.models.execution.trials.trial_runs import FORWARD_TOLERANCE, decode_step, run_schedule, with_trials
from swarm.models.weights.frozen_linear import FrozenLinear

logger = logging.getLogger(__name__)

MAX_FLAT_BLOCK_BYTES = 64e6
"""Weights of a block up to which a flat forward is tried: it saves 0.4 ms a block, and tracing keeps 32 MB."""

PAGED_SESSIONS, PAGED_POSITIONS = 16, 500
"""Sessions whose decode steps tell whether pages are faster, and how long they are: two pages each. With few short ones
a call of attention for each session costs least, and servers have many longer ones."""


def choose_forward(
    model: SpanModel,
    compile_in: Path | None = None,
    recorder: GraphRecorder | None = None,
    requested: LayoutRequest = "auto",
) -> SpanModel:
    """A model of the same blocks that runs packed tokens in the fastest way with the same results.

    Takes a second or two for small models, and half a minute more where it compiles.

    Args:
        compile_in: folder of compiled code; None not to compile.
        recorder: records decode steps; None for CUDA graphs on a GPU, and for no recording elsewhere.
        requested: what `choose_layout` was asked for. If "auto", a GPU leaves pages where it is not faster with them.
    """
    plain = with_trials(model.with_strategy(model.strategy.plain()), *_trials_of_products(model))
    if not plain.strategy.packed or plain.flash is not None:  # what is traced or recorded reads nothing from flash
        return plain
    best = _try_traced_forwards(plain, compile_in)
    if recorder is None and model.device.type == "cuda":
        recorder = CudaGraphRecorder(model.device)
    if best.strategy.paging is None:
        return best
    if recorder is not None:
        best = _better_of(best, "graph of decode steps", partial(_try_graphs, best, recorder))
    return _unless_contiguous_is_faster(best) if model.device.type == "cuda" and requested == "auto" else best


def _trials_of_products(model: SpanModel) -> list[Trial]:
    """How products of quantized weights are computed, unless the strategy says so already."""
    products = [one for one in model.module.modules() if isinstance(one, FrozenLinear)]
    made = dict.fromkeys(trial for product in products for trial in product.trials)
    return [trial for trial in made if trial not in model.strategy.trials]


def _unless_contiguous_is_faster(paged: SpanModel) -> SpanModel:
    """The model, or one with a contiguous cache: pages are for GPUs, but not every card is faster with them."""
    contiguous = paged.with_strategy(replace(paged.strategy, layout="contiguous", paging=None, graph_recorder=None))
    way = f"pages for {PAGED_SESSIONS} sessions"
    trial = partial(_decodes_faster, paged, contiguous, PAGED_SESSIONS, PAGED_POSITIONS)
    timing, why_not = attempt(f"Timing {way}", trial)
    if timing is None:
        return with_trials(paged, Trial(way, True, f"not compared with a contiguous cache: {why_not}"))
    return with_trials(paged if timing else contiguous, Trial(way, bool(timing), f"{timing} with a contiguous cache"))


def _better_of(
    best: SpanModel, way: str, trial: Callable[[], tuple[SpanModel, str]], level: int = logging.DEBUG
) -> SpanModel:
    """The model that the trial makes, or the best so far; either says what came of the trial."""
    made, why_not = attempt(f"A {way}", trial, level)
    if made is None:
        return with_trials(best, Trial(way, False, why_not))
    return with_trials(made[0], Trial(way, True, made[1]))


def _try_traced_forwards(plain: SpanModel, compile_in: Path | None) -> SpanModel:
    """The fastest of the model itself and its traced forwards."""
    small = plain.weight_bytes < MAX_FLAT_BLOCK_BYTES * plain.span.length
    if not small and compile_in is None:
        return plain
    expected = run_schedule(plain).outputs
    example = torch.randn(2, 1, plain.hidden_size).to(plain.device, plain.dtype)
    traced, why_not = attempt("Tracing", partial(TracedForward, plain.module, plain.run_modules, example))
    if traced is None:
        logger.info("The forward of this family cannot be traced; its modules run as they are")
        return with_trials(plain, Trial("traced forward", False, why_not))
    makers: dict[ForwardKind, Callable[[], TokenForward]] = {"flat": partial(traced.flat, plain.layers)}
    if compile_in is not None:
        makers["compiled"] = partial(traced.compiled, compile_in)
    best = plain
    for kind, make in makers.items():
        trial = partial(_try_traced_forward, best, kind, make, expected)
        best = _better_of(best, f"{kind} forward", trial, logging.WARNING)
    return best


def _try_traced_forward(
    best: SpanModel, kind: ForwardKind, make: Callable[[], TokenForward], expected: torch.Tensor
) -> tuple[SpanModel, str]:
    """A model with that forward, and why it is used. Raises `NotBetter` than the best so far."""
    forward = make()
    flat = forward if isinstance(forward, FlatForward) else best.strategy.flat
    candidate = best.with_strategy(replace(best.strategy, forward=kind, traced=forward, flat=flat))
    return candidate, _right_and_faster(candidate, best, expected)


def _try_graphs(best: SpanModel, recorder: GraphRecorder) -> tuple[SpanModel, str]:
    """A model with recorded decode steps, and why it is used. Raises `NotBetter` than the best so far."""
    expected = run_schedule(best).outputs
    candidate = best.with_strategy(replace(best.strategy, graph_recorder=recorder))
    graphs = candidate.graphs
    assert graphs is not None
    reason = _right_and_faster(candidate, best, expected)
    if not graphs.works:
        raise NotBetter(f"recording failed: {graphs.failure}")
    return candidate, reason


def _right_and_faster(candidate: SpanModel, best: SpanModel, expected: torch.Tensor) -> str:
    """Why a candidate is used. Raises `NotBetter` than the best so far."""
    error, tolerance = _relative_error(candidate, expected), FORWARD_TOLERANCE[best.dtype]
    if not error < tolerance:  # also if it is not a number
        raise NotBetter(f"its results are wrong: relative error {error:.1e}, and {tolerance:.0e} is allowed")
    if candidate.graphs is not None and not candidate.graphs.works:
        raise NotBetter(f"recording failed: {candidate.graphs.failure}")
    timing = _decodes_faster(candidate, best)
    if not timing:
        raise NotBetter(f"right, but not faster: {timing}")
    return f"right and faster: {timing}"


def _relative_error(model: SpanModel, expected: torch.Tensor) -> float:
    """How far the outputs of the schedule are from what is expected."""
    return float((run_schedule(model).outputs - expected).norm() / expected.norm())


def _decodes_faster(model: SpanModel, other: SpanModel, sessions: int = 1, positions: int = 16) -> Timing:
    """Whether a decode step takes less time in `model` than in `other`."""
    steps = decode_step(model, None, sessions, positions), decode_step(other, None, sessions, positions)
    # A GPU computes while this thread does nothing, so the thread's time is not a measure there.
    return is_faster(*steps, clock=time.perf_counter) if model.device.type == "cuda" else is_faster(*steps)
