"""Whether a span's tokens may be computed packed: not by a list of families, but by trying it on the loaded blocks.

A short schedule (prompts of different lengths, then single tokens of several sessions at once) goes through both ways.
What agrees is used; where a family computes attention in a way that packed tokens cannot follow, the results differ or
the attempt fails, and the slower way, which works for every family, is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from swarm.data_structures import StepLayout
from swarm.models.capture import Capture, Function, faster
from swarm.models.families import POSITIONS_BY_SLOT
from swarm.models.kv_cache import SessionCache, advance
from swarm.models.span import SpanModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Of what the blocks add to a token, relative to its norm."""

CAPTURED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Of all outputs together, relative to their norm."""

WORTH_CAPTURING = 32e6
"""Bytes of a block's weights. Larger blocks spend their time reading them; the 5 % that a flat forward gains there is
not worth the 32 MB that writing it down leaves in memory."""

AGREEING = 0.75
"""Share of tokens that have to agree. A mixture of experts may send a token elsewhere for a rounding error."""


def decide(model: SpanModel) -> None:
    """Set `model.packed`."""
    model.packed = False
    if model.family in POSITIONS_BY_SLOT:
        return
    inputs, expected = _schedule(model)
    model.packed = True
    try:
        # Beside what the blocks add, not beside what goes through them: small weights would hide a wrong attention.
        error_T = (_schedule(model)[1] - expected).norm(dim=1) / (expected - inputs).norm(dim=1)
        model.packed = bool((error_T < TOLERANCE[model.dtype]).float().mean() >= AGREEING)
    except Exception as error:  # whatever a family's code makes of what it did not expect
        logger.debug("packed tokens are not possible: %r", error)
        model.packed = False
    if not model.packed:
        logger.info("These blocks compute one session at a time: their attention cannot be shared between sessions")


def try_capture(model: SpanModel, compile_in: Path | None = None) -> str:
    """Set `model.captured` to the fastest way of running a step's tokens that gives the same results.

    Takes a second or two for small models; half a minute more where it compiles.

    Args:
        compile_in: folder of compiled code; None not to compile.

    Returns:
        "plain", "flat" or "compiled".
    """
    model.captured, best = None, "plain"
    small = model.weight_bytes < WORTH_CAPTURING * model.span.length
    if not model.packed or (not small and compile_in is None):
        return best
    _, expected = _schedule(model)
    example = torch.randn(2, 1, model.hidden_size).to(model.device, model.dtype)
    ways = {"flat": lambda capture: capture.flat()}
    if compile_in is not None:
        ways["compiled"] = lambda capture: capture.compiled(compile_in)
    try:
        capture = Capture(model.module, model.run_tokens, example)
    except Exception as error:  # whatever torch makes of a family's code
        logger.info("This family's forward cannot be written down; its modules run as they are")
        logger.debug("because of %r", error)
        return best
    for name, way in ways.items():
        fastest = model.captured
        try:
            candidate = model.captured = way(capture)
            off = float((_schedule(model)[1] - expected).norm() / expected.norm())
            if off < CAPTURED_TOLERANCE[model.dtype] and faster(
                _decode_step(model, candidate), _decode_step(model, fastest)
            ):
                best, fastest = name, candidate
            else:
                logger.debug("%s is no better: relative error %.1e", name, off)
        except Exception as error:
            logger.warning("A %s forward is not possible here: %r", name, error)
        model.captured = fastest
    return best


def _decode_step(model: SpanModel, captured: Function | None) -> Callable[[], object]:
    """A step of one token, again and again in the same place, by `captured`: it leaves that in `model.captured`."""
    cache = SessionCache(model)
    cache.step(torch.randn(16, model.hidden_size).to(model.device, model.dtype), StepLayout((0,), (16,)))
    hidden = torch.randn(1, model.hidden_size).to(model.device, model.dtype)

    def step() -> None:
        model.captured = captured
        cache.step(hidden, StepLayout((16,), (1,)))

    return step


def _schedule(model: SpanModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What a short schedule of two sessions puts in and what comes out, each `[tokens, hidden]`."""
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []

    def hidden(tokens: int) -> torch.Tensor:
        inputs.append(torch.randn(tokens, model.hidden_size, generator=generator).to(model.device, model.dtype))
        return inputs[-1]

    first, second = SessionCache(model), SessionCache(model)
    outputs = [
        first.step(hidden(10), StepLayout((0, 0), (5, 5))),
        second.step(hidden(9), StepLayout((0,), (9,))),
        second.step(hidden(3), StepLayout((9,), (3,))),
    ]
    works = [
        first.begin(hidden(2), StepLayout((5, 5), (1, 1))),
        second.begin(hidden(1), StepLayout((12,), (1,))),
    ]
    advance([(work, work.left) for work in works])
    outputs += [work.output for work in works]
    return torch.cat(inputs).float(), torch.cat(outputs).float()
