"""What trials of strategies run: a short schedule, whose outputs are compared, and decode steps, which are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from swarm.common.trials import Trial
from swarm.data_structures import StepLayout
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.weights.frozen_linear import FrozenLinear

DECODE_ROUNDS = 4
"""Rounds of single tokens in the schedule."""

FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Error of all outputs together, relative to their norm."""


def decode_step(
    model: SpanModel, exits: StepExits | None = None, sessions: int = 1, positions: int = 16
) -> Callable[[], object]:
    """A step of one token of each session, again and again at the same position."""
    positions = min(positions, (model.positions or positions + 1) - 1)
    caches = [SessionCache(model) for _ in range(sessions)]
    for cache in caches:
        past = torch.randn(positions, model.hidden_size).to(model.device, model.dtype)
        cache.step(past, StepLayout((0,), (positions,)))
    hidden = torch.randn(1, model.hidden_size).to(model.device, model.dtype)

    def step() -> None:
        works = [cache.start_step(hidden, StepLayout((positions,), (1,)), exits) for cache in caches]
        advance_steps([(work, 1) for work in works])
        for work in works:
            work.commit()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return step


class ScheduleRun(NamedTuple):
    """What went into a schedule and what came out.

    Attributes:
        inputs, outputs: `[tokens, hidden]`, fp32.
        has_past: `[tokens]` bool, whether a token continues what earlier steps have put into the cache.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    has_past: torch.Tensor


def run_schedule(model: SpanModel, longer: int = 0) -> ScheduleRun:
    """Run a short schedule of two sessions: prompts, three tokens at once, and rounds of single tokens.

    Args:
        longer: tokens that one of the sequences has beyond a few.
    """
    generator = torch.Generator().manual_seed(0)
    inputs: list[torch.Tensor] = []

    def hidden(tokens: int) -> torch.Tensor:
        inputs.append(torch.randn(tokens, model.hidden_size, generator=generator).to(model.device, model.dtype))
        return inputs[-1]

    first, second = SessionCache(model), SessionCache(model)
    prompts = 10 + 9 + longer
    outputs = [
        first.step(hidden(10), StepLayout((0, 0), (5, 5))),
        second.step(hidden(9 + longer), StepLayout((0,), (9 + longer,))),
        second.step(hidden(3), StepLayout((9 + longer,), (3,))),
    ]
    for number in range(DECODE_ROUNDS):
        steps = [
            first.start_step(hidden(2), StepLayout((5 + number,) * 2, (1, 1))),
            second.start_step(hidden(1), StepLayout((12 + longer + number,), (1,))),
        ]
        advance_steps([(step, step.tokens_left) for step in steps])
        for step in steps:
            step.commit()
            outputs.append(step.output)
    all_inputs = torch.cat(inputs).float()
    has_past = torch.arange(len(all_inputs), device=all_inputs.device) >= prompts
    return ScheduleRun(all_inputs, torch.cat(outputs).float(), has_past)


def rounding_dtype(model: SpanModel) -> torch.dtype:
    """The dtype whose rounding errors outputs may have: not fp32 where products of quantized weights round inputs."""
    rounds = any(isinstance(module, FrozenLinear) and module.rounds_inputs for module in model.module.modules())
    return torch.float16 if rounds and model.dtype == torch.float32 else model.dtype


def with_trials(model: SpanModel, *trials: Trial) -> SpanModel:
    """The model, whose strategy says that this was tried as well."""
    return model.with_strategy(model.strategy.after(*trials))
