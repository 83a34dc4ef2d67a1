"""Gradients of inputs and of LoRA on the card, against a processor in fp32."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from benchmarks.gpu import schedules, tiny
from benchmarks.gpu.adapters import random_adapter
from benchmarks.gpu.bench import Bench, Case, Step, WrongResult
from benchmarks.gpu.records import Measured
from swarm.data_structures import StepLayout
from swarm.models.execution.gradients import SpanGradients, compute_gradients
from swarm.models.execution.span_model import SpanModel

FAMILIES = ("llama", "mistral", "gemma2", "mixtral")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUT = StepLayout((0, 0, 0), (7, 12, 3))

FLOOR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Relative error that is always allowed: a backward rounds more often than a forward."""


def _cases(bench: Bench) -> list[Case]:
    pairs = itertools.product(bench.sized(FAMILIES, FAMILIES[:1]), DTYPES)
    return [Case(f"{family} {name}", partial(_gradients, family=family, name=name), 2.0) for family, name in pairs]


STEP = Step("training", "Gradients, against a processor in fp32", 15.0, _cases)


def _gradients(bench: Bench, family: str, name: str) -> Measured:
    dtype = DTYPES[name]
    checkpoint = tiny.checkpoint_of(family)
    exact = _compute(tiny.load(checkpoint, torch.float32, tiny.CPU))
    rounded = exact if dtype is torch.float32 else _compute(tiny.load(checkpoint, dtype, tiny.CPU))
    found = _compute(tiny.load(checkpoint, dtype, bench.device))
    errors = [_errors(one, exact) for one in (found, rounded)]
    values: dict[str, float | int | str] = {"inputs": errors[0][0], "LoRA": errors[0][1]}
    for part, error, of_processor in zip(("inputs", "LoRA"), *errors, strict=True):
        limit = schedules.ROUNDING_FACTOR * of_processor + FLOOR[dtype]
        if not error <= limit:
            raise WrongResult(f"gradients of {part}: relative error {error:.2e}, and {limit:.2e} is allowed")
    return Measured(values)


def _compute(model: SpanModel) -> SpanGradients:
    noise = torch.Generator().manual_seed(0)
    inputs, ends = (
        torch.randn(LAYOUT.tokens, model.hidden_size, generator=noise).to(model.device, model.dtype) for _ in range(2)
    )
    adapter = model.adapted.prepare(random_adapter(model, rank=4))
    return compute_gradients(model, inputs, ends, LAYOUT, adapter)


def _errors(found: SpanGradients, exact: SpanGradients) -> tuple[float, float]:
    def flat(gradients: SpanGradients) -> torch.Tensor:
        return torch.cat([one.float().cpu().flatten() for part in gradients.parts.values() for one in part])

    return _relative(found.inputs.float().cpu(), exact.inputs), _relative(flat(found), flat(exact))


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    error = float((found - exact.float()).norm() / exact.float().norm())
    return error if error == error else float("inf")
