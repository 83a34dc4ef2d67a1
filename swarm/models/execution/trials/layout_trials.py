"""Which layout of the attention cache some loaded blocks can compute with, and which kernel reads their pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch

from swarm.common.trials import NotBetter, Trial, attempt
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.attention.paged_kernels import (
    PagedKernel,
    agrees_with_reference,
    candidate_kernels,
    step_seconds,
)
from swarm.models.cutting.families import POSITIONS_FROM_CACHE_LENGTH
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import PADDED, CacheLayout, ExecutionStrategy
from swarm.models.execution.trials.trial_runs import ScheduleRun, rounding_dtype, run_schedule, with_trials

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

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})


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
        return with_trials(padded, Trial("contiguous cache", False, why or "its results are wrong"))
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
    return with_trials(contiguous, *trials)


def _with_fastest_pages(usable: Mapping[PagedKernel, SpanModel], trials: Sequence[Trial]) -> SpanModel:
    """The one of several paged models that are right whose kernel is the fastest; the first if none can be timed."""
    first, model = next(iter(usable.items()))
    if len(usable) == 1:
        return with_trials(model, *trials, Trial(_pages_by(first), True, "its results are right"))
    assert model.strategy.paging is not None
    keys, _ = next(iter(model.strategy.paging.pool.layers.values()))
    timed = {one: attempt("Timing a kernel", partial(step_seconds, one, keys, _query_heads(model, keys.shape[2])))
             for one in usable}  # fmt: skip
    seconds = {one: found for one, (found, _) in timed.items() if found is not None}
    fastest = min(seconds, key=seconds.__getitem__) if seconds else first
    faster = f"{_pages_by(fastest)} is faster"
    slower = [Trial(_pages_by(one), False, timed[one][1] or faster) for one in usable if one is not fastest]
    reason = "its results are right" + (", and it is the fastest" if seconds else ", and none could be timed")
    return with_trials(usable[fastest], *trials, *slower, Trial(_pages_by(fastest), True, reason))


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
