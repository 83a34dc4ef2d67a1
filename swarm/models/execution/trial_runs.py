"""What trials of strategies run: a short schedule, whose outputs are compared, and decode steps, which are timed.

A trial may fail in any way (`attempt`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from swarm.data_structures import StepLayout
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.weights.frozen_linear import FrozenLinear

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotBetter(Exception):
    """A candidate is not used; the message says why."""


class Timing(NamedTuple):
    """Median seconds of a step of a candidate, and of what it would replace. True if the candidate is faster."""

    candidate: float
    other: float

    def __bool__(self) -> bool:
        return self.candidate < self.other

    def __str__(self) -> str:
        return f"{self.candidate * 1e3:.2f} ms a step instead of {self.other * 1e3:.2f}"


def is_faster(
    function: Callable[[], object],
    other: Callable[[], object],
    rounds: int = 15,
    clock: Callable[[], float] = time.thread_time,
) -> Timing:
    """Whether `function` takes less of this thread's time, or of another clock's, than `other`: medians of turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for one, seconds in zip((function, other), times, strict=True):
            began = clock()
            one()
            seconds.append(clock() - began)
    return Timing(statistics.median(times[0]), statistics.median(times[1]))


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


DECODE_ROUNDS = 4
"""Rounds of single tokens in the schedule."""


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


def attempt(what: str, trial: Callable[[], T], level: int = logging.DEBUG) -> tuple[T | None, str]:
    """The result of a trial, or None and why there is none.

    The one place where every error is expected: a trial runs a family's own code, torch's tracer and compiler, or a
    kernel on something that they may not support, and each of them has errors of its own.
    """
    try:
        return trial(), ""
    except NotBetter as refusal:
        logger.debug("%s is not better: %s", what, refusal)
        return None, str(refusal)
    except Exception as error:
        logger.log(level, "%s is not possible here: %r", what, error)
        return None, f"it fails: {(str(error).splitlines() or [type(error).__name__])[0]}"
