"""Whether a span's tokens may be computed packed: not by a list of families, but by trying it on the loaded blocks.

A short schedule (prompts of different lengths, then single tokens of several sessions at once) goes through both ways.
What agrees is used; where a family computes attention in a way that packed tokens cannot follow, the results differ or
the attempt fails, and the slower way, which works for every family, is kept.
"""

from __future__ import annotations

import logging

import torch

from swarm.data_structures import StepLayout
from swarm.models.families import POSITIONS_BY_SLOT
from swarm.models.kv_cache import SessionCache, advance
from swarm.models.span import SpanModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Of what the blocks add to a token, relative to its norm."""

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
