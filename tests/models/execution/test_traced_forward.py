"""A traced forward against the family's own modules, for any batch."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ForwardKind
from swarm.models.execution.tracing.flat_forward import FlatForward
from swarm.models.execution.tracing.traced_forward import TokenForward, TracedForward
from swarm.models.execution.trials import forward_trials
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.weights.frozen_linear import prepack
from tests.models.execution.test_session_cache import HIDDEN, close, load, slow

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2", "cohere2")

PARTS = [Span(start, end) for start in range(1, 4) for end in range(start + 1, 5)]
"""Of the span 1:4."""

LENGTHS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any), min_size=1, max_size=3)


def trace_of(model: SpanModel) -> TracedForward:
    return TracedForward(model.module, model.run_modules, torch.randn(2, 1, HIDDEN))


def traced(model: SpanModel, kind: ForwardKind, function: TokenForward) -> SpanModel:
    flat = function if isinstance(function, FlatForward) else None
    return model.with_strategy(replace(model.strategy, forward=kind, traced=function, flat=flat))


def outputs(model: SpanModel, sessions: list[list[int]], steps: int) -> torch.Tensor:
    """Prompts of some sessions, then single tokens of all of them at once."""
    generator = torch.Generator().manual_seed(1)
    caches = [SessionCache(model) for _ in sessions]
    results = []
    for step in range(steps):
        works = []
        for cache, counts in zip(caches, sessions, strict=True):
            counts = tuple(counts) if step == 0 else (1,) * len(counts)
            starts = cache.lengths or (0,) * len(counts)
            works.append(
                cache.start_step(torch.randn(sum(counts), HIDDEN, generator=generator), StepLayout(starts, counts))
            )
        advance_steps([(work, work.tokens_left) for work in works])
        for work in works:
            work.commit()
            results.append(work.output)
    return torch.cat(results)


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "opt", "gemma3_text", "deepseek_v2", "phi", "exaone4"])
def test_every_part_of_a_flat_forward_is_what_the_modules_compute(family, tmp_path_factory):
    model = load(family, tmp_path_factory)
    flat = traced(model, "flat", trace_of(model).flat(model.layers))
    sessions = [[3], [2, 0, 7]]
    for part in PARTS:
        found, plain = flat.narrowed(part), model.narrowed(part)
        assert (found.strategy.forward, plain.strategy.forward) == ("flat", "plain")
        close(outputs(found, sessions, 3), outputs(plain, sessions, 3))
        inner = Span(part.start, part.start + 1)
        close(outputs(found.narrowed(inner), sessions, 2), outputs(model.narrowed(inner), sessions, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_is_what_the_modules_compute(family, tmp_path_factory):
    model = load(family, tmp_path_factory)
    flat = traced(model, "flat", trace_of(model).flat(model.layers))

    @given(LENGTHS, st.integers(1, 3))
    @settings(slow, max_examples=15)
    def batches(sessions, steps):
        close(outputs(flat, sessions, steps), outputs(model, sessions, steps))

    batches()


def test_products_of_prepacked_weights_stay_calls(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    expected = outputs(model, [[3], [2, 2]], 3)
    monkeypatch.setattr("swarm.models.weights.frozen_linear.MIN_PREPACKED_FP32_WEIGHTS", 0)
    prepack(model.module)
    flat = traced(model, "flat", trace_of(model).flat(model.layers))
    close(outputs(flat, [[3], [2, 2]], 3), expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling takes a C++ compiler")
def test_compiled_is_what_the_modules_compute(tmp_path_factory, tmp_path):
    """Also when it comes from the disk. A single token, for which it was not traced, is right too."""
    model = load("llama", tmp_path_factory).narrowed(Span(1, 2))
    batches = ([[1]], [[3], [2, 2], [7]])
    expected = [outputs(model, sessions, 2) for sessions in batches]
    for _ in range(2):
        compiled = traced(model, "compiled", trace_of(model).compiled(tmp_path))
        for sessions, one in zip(batches, expected, strict=True):
            close(outputs(compiled, sessions, 2), one)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_wrong_or_slower_is_not_used(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    monkeypatch.setattr(forward_trials, "is_faster", lambda one, other: False)
    found = choose_forward(model).strategy
    assert (found.forward, found.traced) == ("plain", None)
    monkeypatch.setattr(forward_trials, "is_faster", lambda one, other: True)
    found = choose_forward(model).strategy
    assert found.forward == "flat"
    assert found.traced is not None
    monkeypatch.setattr(TracedForward, "flat", lambda self: lambda hidden, positions: hidden)
    found = choose_forward(model).strategy
    assert (found.forward, found.traced) == ("plain", None)


def test_what_is_faster_stays_in_use_after_the_comparison(tmp_path_factory, monkeypatch):
    """The comparison runs both ways in turns, and the slower one last."""
    model = load("llama", tmp_path_factory)

    def slower_last(one, other):
        one(), other()
        return True

    monkeypatch.setattr(forward_trials, "is_faster", slower_last)
    found = choose_forward(model).strategy
    assert found.forward == "flat"
    assert found.traced is not None
    used = found.traced
    monkeypatch.setattr(forward_trials, "is_faster", lambda one, other: (one(), other(), False)[-1])
    monkeypatch.setattr(TracedForward, "compiled", lambda self, folder: lambda *inputs: used(*inputs))
    found = choose_forward(model, "unused").strategy
    assert (found.forward, found.traced) == ("plain", None)


def test_trials_leave_the_model_as_it_was(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    monkeypatch.setattr(forward_trials, "is_faster", lambda one, other: True)
    before = model.strategy
    chosen = choose_forward(model)
    assert model.strategy is before
    assert (chosen.strategy.layout, chosen.strategy.forward) == (before.layout, "flat")
    sessions = [[3], [2, 2]]
    close(outputs(chosen, sessions, 3), outputs(model, sessions, 3))


def test_a_trial_that_fails_is_a_candidate_that_is_not_used(tmp_path_factory, monkeypatch, caplog):
    model = load("llama", tmp_path_factory)

    def fails(*arguments):
        raise LookupError("no such operation")

    monkeypatch.setattr(TracedForward, "flat", fails)
    assert choose_forward(model).strategy.forward == "plain"
    assert "A flat forward is not possible here: LookupError('no such operation')" in caplog.text
    monkeypatch.setattr(forward_trials, "TracedForward", fails)
    assert choose_forward(model).strategy.forward == "plain"


def test_a_family_that_cannot_be_packed_is_left_alone(tmp_path_factory):
    model = load("falcon_alibi", tmp_path_factory)
    found = choose_forward(model).strategy
    assert (found.forward, found.traced) == ("plain", None)
