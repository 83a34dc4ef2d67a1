"""Which strategy some loaded blocks compute with: chosen by rule, and used only if it proves right on these blocks.

There is no list of families. A short schedule (prompts of different lengths, then single tokens of several sessions at
once) runs through a model of each candidate. If that fails, or its outputs are wrong, the slower way that works for
every family stays. Each candidate is a `SpanModel` of its own around the same weights, so a model that serves never
changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from swarm.data_structures import StepLayout
from swarm.errors import CheckpointError
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.attention.paged_attention import (
    PagedAttention,
    PagedKernel,
    agrees_with_reference,
    paged_kernel,
)
from swarm.models.cutting import families
from swarm.models.execution.cuda_graphs import CudaGraphRecorder, GraphRecorder
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.execution.strategy import PADDED, CacheLayout, ExecutionStrategy
from swarm.models.execution.traced_fill import traced_fill
from swarm.models.execution.traced_forward import flat_forward
from swarm.models.weights.frozen_linear import FrozenLinear

logger = logging.getLogger(__name__)

LayoutRequest = CacheLayout | Literal["auto"]
"""Which layout to use. One that the family or the device cannot compute with is replaced by the next of paged,
contiguous, padded. "auto" is paged on a GPU in 16 bits, for which a kernel exists, and contiguous elsewhere. On a CPU
(hidden 256, 8 blocks, fp32, one thread) pages took 1.05 times as long for 64 positions; for 1,024, 1.5 to 2.3 times."""

MAX_FLAT_BLOCK_BYTES = 64e6
"""Weights of a block up to which its forward is traced on a CPU. A flat forward saves 0.3 ms a block, and its proof
reads the weights 16 times."""

LAYOUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Error of a token's output, relative to the norm of what the blocks add to the token."""

STATE_TOLERANCE = 1e-2
"""The same where layers have states: families compute several tokens by other formulas than one, which round otherwise.
A state that is lost or taken twice changes outputs by tenths."""

MIN_AGREEING_SHARE = 0.75
"""Share of the tokens with a past, and of those without, that have to agree. A mixture of experts may send a token
elsewhere because of a rounding error."""

FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Error of all outputs together, relative to their norm."""

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})
DECODE_ROUNDS = 4
"""Rounds of single tokens in the schedule."""

SKIPS_ALL = StepExits(None, (1,))
"""A step of a token that left before."""


class NotRight(Exception):
    """A candidate is not used; the message says why."""


def choose_layout(model: SpanModel, requested: LayoutRequest = "auto") -> SpanModel:
    """A model of the same blocks that lays out keys and values as requested, or in the next best way that works.

    Weights on flash are all read meanwhile, so that what a predictor selects makes no difference between two ways.
    """
    padded = model.with_strategy(PADDED)
    if (requested == "padded" and not model.has_states) or model.family in families.POSITIONS_FROM_CACHE_LENGTH:
        return padded
    with model.flash.exactly() if model.flash is not None else nullcontext():
        # What a trained model forgets may be too little to be seen in random texts.
        by_token = model.family in families.FORGET_STATES
        contiguous = model.with_strategy(ExecutionStrategy("contiguous", by_token=by_token))
        expected = run_whole_texts(padded)
        if not _proves_right("A contiguous cache", partial(_require_agreement, contiguous, expected)):
            if model.has_states:
                one_by_one = model.with_strategy(ExecutionStrategy("contiguous", by_token=True))
                if _proves_right("One token after the other", partial(_require_agreement, one_by_one, expected)):
                    return one_by_one
                raise CheckpointError(
                    f"the states of a {model.family} model cannot be continued from step to step on this machine; "
                    "update transformers, or serve another model"
                )
            logger.info("These blocks compute one session at a time")
            return padded
        automatic = model.device.type == "cuda" and model.dtype in HALF_PRECISION
        is_paged = requested == "paged" or (requested == "auto" and automatic)
        return _in_pages(contiguous) if is_paged and not model.has_states else contiguous  # pages hold no states


def _in_pages(contiguous: SpanModel) -> SpanModel:
    """A model with a paged cache, if the blocks and one of this machine's kernels can compute with it."""
    # A sequence of more than a page, unless the model has a table of positions that ends before.
    positions = contiguous.positions
    longer = PAGE_POSITIONS if positions is None or positions > 2 * PAGE_POSITIONS else 0
    expected = run_schedule(contiguous, longer)
    kernel = paged_kernel(contiguous.device)
    if kernel is None:
        logger.info("The attention cache is not kept in pages: torch reads them from 2.13 on")
        return contiguous
    paged = contiguous.with_strategy(ExecutionStrategy("paged", PagedAttention(PagePool(), kernel)))
    return _proves_right("Attention over pages", partial(_require_pages, paged, kernel, expected, longer)) or contiguous


def choose_forward(model: SpanModel, recorder: GraphRecorder | None = None) -> SpanModel:
    """A model of the same blocks and layout with the forward of packed tokens that suits the device.

    Decode steps over pages are recorded on a GPU. On a CPU, the forward of small blocks is traced.

    Args:
        recorder: records decode steps; None for CUDA graphs on a GPU, and for no recording elsewhere.
    """
    plain = model.with_strategy(replace(model.strategy, flat=None, traced_fill=None, graph_recorder=None))
    # What is traced or recorded reads nothing from flash, and knows no states.
    if not plain.strategy.packed or plain.flash is not None or plain.has_states:
        return plain
    if plain.strategy.paging is not None and (recorder is not None or model.device.type == "cuda"):
        recorder = recorder or CudaGraphRecorder(model.device)
        candidate = plain.with_strategy(replace(plain.strategy, graph_recorder=recorder))
        return _if_right("A recorded decode step", lambda: candidate, plain)
    if model.device.type == "cpu" and plain.weight_bytes <= MAX_FLAT_BLOCK_BYTES * plain.span.length:
        return _if_right("A flat forward", partial(_with_flat_forward, plain), plain)
    return plain


def choose_exit_forwards(model: SpanModel) -> None:
    """Choose how the pieces of a span are computed, between which tokens leave, and how they are filled."""
    for piece in model.pieces():
        if piece is not model:
            plain = piece.with_strategy(replace(piece.strategy, graph_recorder=model.strategy.graph_recorder))
            fill = _proves_right("A traced fill", partial(_with_traced_fill, plain))
            model.use_part(fill or plain)


def _with_flat_forward(plain: SpanModel) -> SpanModel:
    return plain.with_strategy(replace(plain.strategy, flat=flat_forward(plain)))


def _with_traced_fill(model: SpanModel) -> SpanModel:
    """The model with a traced fill. Raises `NotRight`."""
    candidate = model.with_strategy(replace(model.strategy, traced_fill=traced_fill(model)))
    _require_small(_relative_error(_behind_a_fill(candidate), _behind_a_fill(model)), model.dtype)
    return candidate


def _if_right(what: str, make: Callable[[], SpanModel], plain: SpanModel) -> SpanModel:
    """The model that `make` makes, if its outputs are those of `plain`; else that one."""

    def proven() -> SpanModel:
        expected, candidate = run_schedule(plain).outputs, make()
        _require_small(_relative_error(run_schedule(candidate).outputs, expected), plain.dtype)
        if candidate.graphs is not None and not candidate.graphs.works:
            raise NotRight(f"recording failed: {candidate.graphs.failure}")
        return candidate

    return _proves_right(what, proven) or plain


def _proves_right(what: str, prove: Callable[[], SpanModel]) -> SpanModel | None:
    """The model that was proven to be right, or None. The log says why.

    Every error is expected: a proof runs a family's own code or a kernel on something that they may not support, and
    each of them has errors of its own.
    """
    try:
        return prove()
    except Exception as error:  # noqa: BLE001  (whatever a kernel or a family raises, the layout is not right)
        reason = str(error) if isinstance(error, NotRight) else f"it fails: {error!r}"
        logger.info("%s is not used for these blocks: %s", what, reason.partition("\n")[0])
        return None


def _require_pages(paged: SpanModel, kernel: PagedKernel, expected: ScheduleRun, longer: int) -> SpanModel:
    _require_agreement(paged, expected, longer)
    # A kernel may ignore a window that is longer than what was tried, and still compute this model right.
    assert paged.strategy.paging is not None
    kinds = {keys.shape: keys for keys, _ in paged.strategy.paging.pool.layers.values()}.values()
    if not all(agrees_with_reference(kernel, keys) for keys in kinds):
        raise NotRight("the kernel is wrong for some windows or lengths")
    return paged


def _require_agreement(model: SpanModel, expected: ScheduleRun, longer: int = 0) -> SpanModel:
    """The model, if its outputs are what is expected, for prompts and for what continues them. Raises `NotRight`."""
    # Relative to what the blocks add, not to what goes through them: small weights would hide a wrong attention.
    added_T = (expected.outputs - expected.inputs).norm(dim=1)
    error_T = (run_schedule(model, longer).outputs - expected.outputs).norm(dim=1) / added_T
    allowed = LAYOUT_TOLERANCE[_rounding_dtype(model)]
    if model.has_states:
        allowed = max(allowed, STATE_TOLERANCE)
    agrees_T = (error_T < allowed).float()
    # Each by itself: a long prompt must not outvote single tokens, which other lines of a kernel compute.
    if not all(bool(agrees_T[of].mean() >= MIN_AGREEING_SHARE) for of in (expected.has_past, ~expected.has_past)):
        raise NotRight("its results are wrong")
    return model


def _require_small(error: float, dtype: torch.dtype) -> None:
    if not error < FORWARD_TOLERANCE[dtype]:  # also if it is not a number
        raise NotRight(f"relative error {error:.1e}, and {FORWARD_TOLERANCE[dtype]:.0e} is allowed")


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _rounding_dtype(model: SpanModel) -> torch.dtype:
    """The dtype whose rounding errors outputs may have: not fp32 where products of quantized weights round inputs."""
    rounds = any(isinstance(module, FrozenLinear) and module.rounds_inputs for module in model.module.modules())
    return torch.float16 if rounds and model.dtype == torch.float32 else model.dtype


class ScheduleRun(NamedTuple):
    """What went into a schedule and what came out.

    Attributes:
        inputs, outputs: `[tokens, hidden]`, fp32.
        has_past: `[tokens]` bool, whether a token continues what earlier steps have put into the cache.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    has_past: torch.Tensor


class ScheduledStep(NamedTuple):
    """A step of the schedule: which of its sessions takes it, and what it brings."""

    session: int
    layout: StepLayout
    hidden: torch.Tensor


def _schedule(model: SpanModel, longer: int) -> list[list[ScheduledStep]]:
    """Steps of two sessions, round by round; those of one round are computed together."""
    generator = torch.Generator().manual_seed(0)

    def step(session: int, starts: tuple[int, ...], counts: tuple[int, ...]) -> ScheduledStep:
        hidden = torch.randn(sum(counts), model.hidden_size, generator=generator).to(model.device, model.dtype)
        return ScheduledStep(session, StepLayout(starts, counts), hidden)

    rounds = [[step(0, (0, 0), (5, 5))], [step(1, (0,), (9 + longer,))], [step(1, (9 + longer,), (3,))]]
    for number in range(DECODE_ROUNDS):
        rounds.append([step(0, (5 + number,) * 2, (1, 1)), step(1, (12 + longer + number,), (1,))])
    return rounds


def run_schedule(model: SpanModel, longer: int = 0) -> ScheduleRun:
    """Run a short schedule of two sessions: prompts, three tokens at once, and rounds of single tokens.

    Args:
        longer: tokens that one of the sequences has beyond a few.
    """
    caches = SessionCache(model), SessionCache(model)
    rounds, outputs = _schedule(model, longer), []
    for together in rounds:
        steps = [caches[one.session].start_step(one.hidden, one.layout) for one in together]
        advance_steps([(step, step.tokens_left) for step in steps])
        for step in steps:
            step.commit()
            outputs.append(step.output)
    return _schedule_run(rounds, outputs)


def run_whole_texts(model: SpanModel) -> ScheduleRun:
    """What the schedule computes, computed without any cache: each sequence in one piece, by itself."""
    rounds = _schedule(model, 0)
    steps = [step for together in rounds for step in together]
    texts: dict[tuple[int, int], list[torch.Tensor]] = {}
    for step in steps:
        for number, tokens in enumerate(step.hidden.split(list(step.layout.counts))):
            texts.setdefault((step.session, number), []).append(tokens)
    whole = {key: model.forward(torch.cat(pieces).unsqueeze(0))[0] for key, pieces in texts.items()}
    outputs = [
        whole[step.session, number][start : start + count]
        for step in steps
        for number, (start, count) in enumerate(zip(step.layout.starts, step.layout.counts, strict=True))
    ]
    return _schedule_run(rounds, outputs)


def _schedule_run(rounds: list[list[ScheduledStep]], outputs: list[torch.Tensor]) -> ScheduleRun:
    steps = [step for together in rounds for step in together]
    has_past = [
        start > 0
        for step in steps
        for start, count in zip(step.layout.starts, step.layout.counts, strict=True)
        for _ in range(count)
    ]
    inputs = torch.cat([step.hidden for step in steps]).float()
    return ScheduleRun(inputs, torch.cat(outputs).float(), torch.tensor(has_past, device=inputs.device))


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
