"""Whether a span's tokens may be computed packed: not by a list of families, but by trying it on the loaded blocks.

A short schedule (prompts of different lengths, then single tokens of several sessions at once) goes through both ways.
What agrees is used; where a family computes attention in a way that packed tokens cannot follow, the results differ or
the attempt fails, and the slower way, which works for every family, is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from swarm.data_structures import StepLayout
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.attention.paged_kernels import agrees_with_reference, candidate_kernels
from swarm.models.cutting.families import POSITIONS_BY_SLOT
from swarm.models.execution.cuda_graphs import CudaGraphRecorder, DecodeGraphs, GraphRecorder
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.traced_forward import TokenForward, TracedForward, is_faster

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Of what the blocks add to a token, relative to its norm."""

CAPTURED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Of all outputs together, relative to their norm."""

WORTH_CAPTURING = 64e6
"""Bytes of a block's weights on a CPU. A flat forward saves 0.4 ms a block: a tenth where the block is of 45 MB, a
hundredth where it is of 500 MB, which is not worth the 32 MB that writing it down leaves in memory. On a GPU, which
waits for Python, it always is."""

HALF = frozenset({torch.bfloat16, torch.float16})

AGREEING = 0.75
"""Share of tokens that have to agree. A mixture of experts may send a token elsewhere for a rounding error."""


CacheLayout = Literal["auto", "paged", "contiguous", "padded"]
"""How rows are laid out: in pages of one pool, in a store for each session, or as rectangles, which every family can
compute with. A layout that the family or the device cannot compute with is replaced by the next one of these three.
"auto" is pages on a GPU in 16 bits, for which kernels exist, and stores elsewhere. On a CPU (hidden 256, 8 blocks, fp32
and one thread) pages took 1.05 times as long for rows of 64 positions; for 1,024, 1.5 times (1 session), 2.3 (8)."""


def decide(model: SpanModel, layout: CacheLayout = "auto") -> None:
    """Set `model.packed` and `model.paging`."""
    model.packed, model.paging = False, None
    if layout == "padded" or model.family in POSITIONS_BY_SLOT:
        return
    inputs, expected = _schedule(model)
    model.packed = True
    model.packed = _agrees(model, inputs, expected)
    if not model.packed:
        logger.info("These blocks compute one session at a time: their attention cannot be shared between sessions")
    elif layout == "paged" or (layout == "auto" and model.device.type == "cuda" and model.dtype in HALF):
        _try_pages(model)


def _try_pages(model: SpanModel) -> None:
    """Set `model.paging` if the blocks, and this machine's kernel, can compute with pages."""
    # A row of more than a page, unless the model has a table of positions that ends before.
    longer = PAGE_POSITIONS if model.positions is None or model.positions > 2 * PAGE_POSITIONS else 0
    inputs, expected = _schedule(model, longer)
    try:
        for kernel in candidate_kernels(model.device):
            model.paging = PagedAttention(PagePool(), kernel)
            # A model is computed right by a kernel that ignores a window which is longer than what is tried here.
            if _agrees(model, inputs, expected, longer) and _agrees_itself(model.paging):
                return
    except ImportError as error:
        logger.debug("this torch has no attention over pages: %r", error)
    model.paging = None
    logger.info("The attention cache is not kept in pages: these blocks, or this GPU, cannot compute with them")


def _agrees_itself(paging: PagedAttention) -> bool:
    """Whether the kernel computes what it should for layers of each shape that have written to the pool."""
    kinds = {keys.shape: keys for keys, _ in paging.pool.layers.values()}.values()
    try:
        return all(agrees_with_reference(paging.kernel, keys) for keys in kinds)
    except Exception as error:  # whatever a kernel makes of shapes that it does not know
        logger.debug("attention over pages is not possible: %r", error)
        return False


def _agrees(model: SpanModel, inputs: torch.Tensor, expected: torch.Tensor, longer: int = 0) -> bool:
    """Whether the model as it is set up now computes what is expected of `_schedule`."""
    try:
        # Beside what the blocks add, not beside what goes through them: small weights would hide a wrong attention.
        error_T = (_schedule(model, longer)[1] - expected).norm(dim=1) / (expected - inputs).norm(dim=1)
        return bool((error_T < TOLERANCE[model.dtype]).float().mean() >= AGREEING)
    except Exception as error:  # whatever a family's code makes of what it did not expect
        logger.debug("this layout is not possible: %r", error)
        return False


def try_capture(model: SpanModel, compile_in: Path | None = None, record: GraphRecorder | None = None) -> str:
    """Set `model.captured` and `model.graphs` to the fastest way of running a step's tokens with the same results.

    Takes a second or two for small models; half a minute more where it compiles.

    Args:
        compile_in: folder of compiled code; None not to compile.
        record: how decode steps are recorded; None for CUDA graphs on a GPU, and not to record elsewhere.

    Returns:
        "plain", "flat" or "compiled"; "graphs" if decode steps are recorded, whatever runs the others.
    """
    model.captured, model.graphs = None, None
    if not model.packed:
        return "plain"
    best = _try_written_down(model, compile_in)
    if record is None and model.device.type == "cuda":
        record = CudaGraphRecorder(model.device)
    return "graphs" if record is not None and _try_graphs(model, record) else best


def _try_written_down(model: SpanModel, compile_in: Path | None) -> str:
    best = "plain"
    small = model.weight_bytes < WORTH_CAPTURING * model.span.length
    if not small and compile_in is None:
        return best
    _, expected = _schedule(model)
    example = torch.randn(2, 1, model.hidden_size).to(model.device, model.dtype)
    ways = {"flat": lambda capture: capture.flat()}
    if compile_in is not None:
        ways["compiled"] = lambda capture: capture.compiled(compile_in)
    try:
        capture = TracedForward(model.module, model.run_tokens, example)
    except Exception as error:  # whatever torch makes of a family's code
        logger.info("This family's forward cannot be written down; its modules run as they are")
        logger.debug("because of %r", error)
        return best
    for name, way in ways.items():
        fastest = model.captured
        try:
            candidate = model.captured = way(capture)
            off = _error(model, expected)
            if off < CAPTURED_TOLERANCE[model.dtype] and _is_faster(model, (candidate, None), (fastest, None)):
                best, fastest = name, candidate
            else:
                logger.debug("%s is no better: relative error %.1e", name, off)
        except Exception as error:
            logger.warning("A %s forward is not possible here: %r", name, error)
        model.captured = fastest
    return best


def _try_graphs(model: SpanModel, record: GraphRecorder) -> bool:
    """Set `model.graphs` if decode steps can be recorded, and are right and faster so."""
    if model.paging is None:
        return False
    _, expected = _schedule(model)
    graphs = model.graphs = DecodeGraphs(model, record)
    off = _error(model, expected)
    right = graphs.works and off < CAPTURED_TOLERANCE[model.dtype]
    better = right and _is_faster(model, (model.captured, graphs), (model.captured, None)) and graphs.works
    if not better:
        logger.debug("recorded steps are no better: relative error %.1e", off)
    model.graphs = graphs if better else None
    return better


def _error(model: SpanModel, expected: torch.Tensor) -> float:
    """How far the model as it is set up now is from what is expected of `_schedule`."""
    return float((_schedule(model)[1] - expected).norm() / expected.norm())


_Way = tuple[TokenForward | None, DecodeGraphs | None]
"""What runs a decode step: `SpanModel.captured` and `SpanModel.graphs`."""


def _is_faster(model: SpanModel, way: _Way, other: _Way) -> bool:
    """Whether a decode step takes less time one way than the other. Leaves the latter in the model."""
    steps = _decode_step(model, way), _decode_step(model, other)
    # A GPU computes while this thread does nothing, so that its time is no measure.
    return is_faster(*steps, clock=time.perf_counter) if model.device.type == "cuda" else is_faster(*steps)


def _decode_step(model: SpanModel, way: _Way) -> Callable[[], object]:
    """A step of one token, again and again in the same place, one way: it leaves that in the model."""
    cache = SessionCache(model)
    cache.step(torch.randn(16, model.hidden_size).to(model.device, model.dtype), StepLayout((0,), (16,)))
    hidden = torch.randn(1, model.hidden_size).to(model.device, model.dtype)

    def step() -> None:
        model.captured, model.graphs = way
        cache.step(hidden, StepLayout((16,), (1,)))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return step


def _schedule(model: SpanModel, longer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a short schedule of two sessions puts in and what comes out, each `[tokens, hidden]`.

    Args:
        longer: tokens that one of them has beyond a few.
    """
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []

    def hidden(tokens: int) -> torch.Tensor:
        inputs.append(torch.randn(tokens, model.hidden_size, generator=generator).to(model.device, model.dtype))
        return inputs[-1]

    first, second = SessionCache(model), SessionCache(model)
    outputs = [
        first.step(hidden(10), StepLayout((0, 0), (5, 5))),
        second.step(hidden(9 + longer), StepLayout((0,), (9 + longer,))),
        second.step(hidden(3), StepLayout((9 + longer,), (3,))),
    ]
    works = [
        first.start_step(hidden(2), StepLayout((5, 5), (1, 1))),
        second.start_step(hidden(1), StepLayout((12 + longer,), (1,))),
    ]
    advance_steps([(work, work.tokens_left) for work in works])
    outputs += [work.output for work in works]
    return torch.cat(inputs).float(), torch.cat(outputs).float()
