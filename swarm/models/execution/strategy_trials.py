"""Finding the best `ExecutionStrategy` for some loaded blocks: every candidate is tried on them before it is used.

There is no list of families. A short schedule (prompts of different lengths, then single tokens of several sessions at
once) runs through a model of each candidate. A candidate is kept if its outputs are right and, where that is the
question, if it is faster. If it fails or differs, the slower way that works for every family stays. Each candidate is a
`SpanModel` of its own around the same weights, so a trial never changes a model that serves. The strategy that is
chosen says what was tried, and why it is used or not (`ExecutionStrategy.trials`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from swarm.common.trials import NotBetter, Timing, Trial, attempt, is_faster
from swarm.data_structures import StepLayout
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.attention.paged_kernels import (
    PagedKernel,
    agrees_with_reference,
    candidate_kernels,
    step_seconds,
)
from swarm.models.cutting.families import POSITIONS_FROM_CACHE_LENGTH
from swarm.models.execution.cuda_graphs import CudaGraphRecorder, GraphRecorder
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.execution.strategy import PADDED, CacheLayout, ExecutionStrategy, ForwardKind
from swarm.models.execution.tracing.flat_forward import FlatForward
from swarm.models.execution.tracing.traced_fill import traced_fill
from swarm.models.execution.tracing.traced_forward import TokenForward, TracedForward
from swarm.models.execution.trial_runs import ScheduleRun, decode_step, rounding_dtype, run_schedule
from swarm.models.weights.frozen_linear import FrozenLinear

logger = logging.getLogger(__name__)

LayoutRequest = CacheLayout | Literal["auto"]
"""Which layout to use. One that the family or the device cannot compute with is replaced by the next of paged,
contiguous, padded. "auto" is paged on a GPU in 16 bits, for which kernels exist, and contiguous elsewhere. On a CPU
(hidden 256, 8 blocks, fp32, one thread) pages took 1.05 times as long for 64 positions; for 1,024, 1.5 to 2.3 times."""

LAYOUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Error of a token's output, relative to the norm of what the blocks add to the token."""

MIN_AGREEING_SHARE = 0.75
"""Share of the tokens with a past, and of those without, that have to agree. A mixture of experts may send a token
elsewhere because of a rounding error."""

FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Error of all outputs together, relative to their norm."""

MAX_FLAT_BLOCK_BYTES = 64e6
"""Weights of a block up to which a flat forward is tried: it saves 0.4 ms a block, and tracing keeps 32 MB."""

SKIPS_ALL = StepExits(None, (1,))
"""A step of a token that left before."""

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})

PAGED_SESSIONS, PAGED_POSITIONS = 16, 500
"""Sessions whose decode steps tell whether pages are faster, and how long they are: two pages each. With few short ones
a call of attention for each session costs least, and servers have many longer ones."""


def choose_layout(model: SpanModel, requested: LayoutRequest = "auto") -> SpanModel:
    """A model of the same blocks that lays out keys and values as requested, or in the next best way that works.

    Weights on flash are all read meanwhile, so that what a predictor selects makes no difference between two ways.
    """
    with model.flash.exactly() if model.flash is not None else nullcontext():
        return _choose_layout(model, requested)


def _choose_layout(model: SpanModel, requested: LayoutRequest) -> SpanModel:
    padded = model.with_strategy(PADDED)
    if requested == "padded" or model.family in POSITIONS_FROM_CACHE_LENGTH:
        return padded
    contiguous = model.with_strategy(ExecutionStrategy("contiguous"))
    agrees, why = attempt("A contiguous cache", partial(_agrees, contiguous, run_schedule(padded)))
    if not agrees:
        logger.info("These blocks compute one session at a time: their attention cannot be shared between sessions")
        return _with_trials(padded, Trial("contiguous cache", False, why or "its results are wrong"))
    automatic = model.device.type == "cuda" and model.dtype in HALF_PRECISION
    if requested == "paged" or (requested == "auto" and automatic):
        return _try_pages(contiguous)
    return contiguous


def _try_pages(contiguous: SpanModel) -> SpanModel:
    """A model with a paged cache, if the blocks and one of this machine's kernels can compute with it."""
    # A sequence of more than a page, unless the model has a table of positions that ends before.
    positions = contiguous.positions
    longer = PAGE_POSITIONS if positions is None or positions > 2 * PAGE_POSITIONS else 0
    trials: list[Trial] = []
    usable: dict[PagedKernel, SpanModel] = {}
    try:
        expected = run_schedule(contiguous, longer)
        for kernel in candidate_kernels(contiguous.device):
            paging = PagedAttention(PagePool(), kernel)
            paged = contiguous.with_strategy(ExecutionStrategy("paged", paging))
            trial = partial(_try_kernel, paged, expected, longer)
            reason, why_not = attempt("A paged cache", trial)
            if reason is not None:
                usable[kernel] = paged
            else:
                trials.append(Trial(_pages_by(kernel), False, why_not))
    except ImportError as error:
        logger.debug("This torch has no attention over pages: %r", error)
        trials.append(Trial("pages", False, "this torch has no attention over them"))
    if usable:
        return _with_fastest_pages(usable, trials)
    logger.info("The attention cache is not kept in pages: %s", "; ".join(map(str, trials)))
    return _with_trials(contiguous, *trials)


def _with_fastest_pages(usable: Mapping[PagedKernel, SpanModel], trials: Sequence[Trial]) -> SpanModel:
    """The one of several paged models that are right whose kernel is the fastest; the first if none can be timed."""
    first, model = next(iter(usable.items()))
    if len(usable) == 1:
        return _with_trials(model, *trials, Trial(_pages_by(first), True, "its results are right"))
    assert model.strategy.paging is not None
    keys, _ = next(iter(model.strategy.paging.pool.layers.values()))
    timed = {one: attempt("Timing a kernel", partial(step_seconds, one, keys, _query_heads(model, keys.shape[2])))
             for one in usable}  # fmt: skip
    seconds = {one: found for one, (found, _) in timed.items() if found is not None}
    fastest = min(seconds, key=seconds.__getitem__) if seconds else first
    faster = f"{_pages_by(fastest)} is faster"
    slower = [Trial(_pages_by(one), False, timed[one][1] or faster) for one in usable if one is not fastest]
    reason = "its results are right" + (", and it is the fastest" if seconds else ", and none could be timed")
    return _with_trials(usable[fastest], *trials, *slower, Trial(_pages_by(fastest), True, reason))


def _query_heads(model: SpanModel, key_heads: int) -> int:
    """Heads of queries that share `key_heads`; as many where the config does not say."""
    heads = getattr(model.module.config, "num_attention_heads", None)
    return heads if isinstance(heads, int) and heads and heads % key_heads == 0 else key_heads


def _pages_by(kernel: PagedKernel) -> str:
    return f"pages by {getattr(kernel, '__name__', kernel)}"


def _try_kernel(paged: SpanModel, expected: ScheduleRun, longer: int) -> str:
    """Why a model with that paged cache is used. Raises `NotBetter`."""
    if not _agrees(paged, expected, longer):
        raise NotBetter("its results are wrong for these blocks")
    # A kernel may ignore a window that is longer than what was tried, and still compute this model right.
    assert paged.strategy.paging is not None
    if not _kernel_agrees(paged.strategy.paging):
        raise NotBetter("the kernel is wrong for some windows or lengths")
    return "its results are right"


def _with_trials(model: SpanModel, *trials: Trial) -> SpanModel:
    return model.with_strategy(model.strategy.after(*trials))


def _trials_of_products(model: SpanModel) -> list[Trial]:
    """How products of quantized weights are computed, unless the strategy says so already."""
    products = [one for one in model.module.modules() if isinstance(one, FrozenLinear)]
    made = dict.fromkeys(trial for product in products for trial in product.trials)
    return [trial for trial in made if trial not in model.strategy.trials]


def _agrees(model: SpanModel, expected: ScheduleRun, longer: int = 0) -> bool:
    """Whether the outputs of the schedule are what is expected, for prompts and for what continues them."""
    # Relative to what the blocks add, not to what goes through them: small weights would hide a wrong attention.
    added_T = (expected.outputs - expected.inputs).norm(dim=1)
    error_T = (run_schedule(model, longer).outputs - expected.outputs).norm(dim=1) / added_T
    agrees_T = (error_T < LAYOUT_TOLERANCE[rounding_dtype(model)]).float()
    # Each by itself: a long prompt must not outvote single tokens, which other lines of a kernel compute.
    return all(bool(agrees_T[of].mean() >= MIN_AGREEING_SHARE) for of in (expected.has_past, ~expected.has_past))


def _kernel_agrees(paging: PagedAttention) -> bool:
    """Whether the kernel is right for layers of each shape that have written to the pool."""
    kinds = {keys.shape: keys for keys, _ in paging.pool.layers.values()}.values()
    return all(agrees_with_reference(paging.kernel, keys) for keys in kinds)


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
    plain = _with_trials(model.with_strategy(model.strategy.plain()), *_trials_of_products(model))
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


def _unless_contiguous_is_faster(paged: SpanModel) -> SpanModel:
    """The model, or one with a contiguous cache: pages are for GPUs, but not every card is faster with them."""
    contiguous = paged.with_strategy(replace(paged.strategy, layout="contiguous", paging=None, graph_recorder=None))
    way = f"pages for {PAGED_SESSIONS} sessions"
    trial = partial(_decodes_faster, paged, contiguous, PAGED_SESSIONS, PAGED_POSITIONS)
    timing, why_not = attempt(f"Timing {way}", trial)
    if timing is None:
        return _with_trials(paged, Trial(way, True, f"not compared with a contiguous cache: {why_not}"))
    return _with_trials(paged if timing else contiguous, Trial(way, bool(timing), f"{timing} with a contiguous cache"))


def _better_of(
    best: SpanModel, way: str, trial: Callable[[], tuple[SpanModel, str]], level: int = logging.DEBUG
) -> SpanModel:
    """The model that the trial makes, or the best so far; either says what came of the trial."""
    made, why_not = attempt(f"A {way}", trial, level)
    if made is None:
        return _with_trials(best, Trial(way, False, why_not))
    return _with_trials(made[0], Trial(way, True, made[1]))


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
        return _with_trials(plain, Trial("traced forward", False, why_not))
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
