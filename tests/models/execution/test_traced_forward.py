"""A captured forward against the family's own modules, for any batch."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import StepLayout
from swarm.models.execution import strategy
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.traced_forward import TracedForward
from swarm.models.weights.frozen_linear import prepack
from tests.models.execution.test_session_cache import HIDDEN, close, load, slow

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2", "cohere2")

LENGTHS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any), min_size=1, max_size=3)


def capture_of(model: SpanModel) -> TracedForward:
    return TracedForward(model.module, model.run_tokens, torch.randn(2, 1, HIDDEN))


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


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_is_what_the_modules_compute(family, tmp_path_factory):
    model = load(family, tmp_path_factory)
    function = capture_of(model).flat()

    @given(LENGTHS, st.integers(1, 3))
    @settings(slow, max_examples=15)
    def batches(sessions, steps):
        model.captured = None
        expected = outputs(model, sessions, steps)
        model.captured = function
        close(outputs(model, sessions, steps), expected)

    batches()


def test_products_of_arranged_weights_stay_calls(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    expected = outputs(model, [[3], [2, 2]], 3)
    monkeypatch.setattr("swarm.models.weights.frozen_linear.MIN_PREPACKED_FP32_WEIGHTS", 0)
    prepack(model.module)
    model.captured = capture_of(model).flat()
    close(outputs(model, [[3], [2, 2]], 3), expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling takes a C++ compiler")
def test_compiled_is_what_the_modules_compute(tmp_path_factory, tmp_path):
    """Also when it comes from the disk. A single token, for which it was not written down, is right too."""
    model = load("llama", tmp_path_factory).narrowed(type(load("llama", tmp_path_factory).span)(1, 2))
    batches = ([[1]], [[3], [2, 2], [7]])
    expected = [outputs(model, sessions, 2) for sessions in batches]
    for _ in range(2):
        model.captured = capture_of(model).compiled(tmp_path)
        for sessions, one in zip(batches, expected, strict=True):
            close(outputs(model, sessions, 2), one)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_wrong_or_slower_is_not_used(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    monkeypatch.setattr(strategy, "is_faster", lambda one, other: False)
    assert strategy.try_capture(model) == "plain"
    assert model.captured is None
    monkeypatch.setattr(strategy, "is_faster", lambda one, other: True)
    assert strategy.try_capture(model) == "flat"
    assert model.captured is not None
    monkeypatch.setattr(TracedForward, "flat", lambda self: lambda hidden, positions: hidden)
    assert strategy.try_capture(model) == "plain"
    assert model.captured is None


def test_what_is_faster_stays_in_use_after_the_comparison(tmp_path_factory, monkeypatch):
    """The comparison runs both ways in turns, and the slower one last."""
    model = load("llama", tmp_path_factory)

    def slower_last(one, other):
        one(), other()
        return True

    monkeypatch.setattr(strategy, "is_faster", slower_last)
    assert strategy.try_capture(model) == "flat"
    assert model.captured is not None
    used = model.captured
    monkeypatch.setattr(strategy, "is_faster", lambda one, other: (one(), other(), False)[-1])
    monkeypatch.setattr(
        TracedForward, "compiled", lambda self, folder: lambda hidden, positions: used(hidden, positions)
    )
    assert strategy.try_capture(model, "unused") == "plain"
    assert model.captured is None


def test_a_family_that_cannot_be_packed_is_left_alone(tmp_path_factory):
    model = load("falcon_alibi", tmp_path_factory)
    assert strategy.try_capture(model) == "plain"
    assert model.captured is None
