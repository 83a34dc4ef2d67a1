"""A traced forward against the family's own modules, for any batch and any part of the blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.models.execution.fewer_calls import with_fewer_calls
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.traced_forward import divide, flat_forward, trace_span
from swarm.models.weights.frozen_linear import prepack
from tests.models.execution.test_session_cache import HIDDEN, close, load, slow

FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2")

PARTS = [Span(1, 4), Span(2, 4), Span(1, 2), Span(3, 4)]
"""Of the span 1:4."""

LENGTHS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any), min_size=1, max_size=3)


def flat_of(model: SpanModel) -> SpanModel:
    """The model with a traced forward."""
    return model.with_strategy(replace(model.strategy, flat=flat_forward(model)))


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
    flat = flat_of(model)
    for part in PARTS:
        found, plain = flat.narrowed(part), model.narrowed(part)
        assert (found.strategy.flat is not None, plain.strategy.flat) == (True, None)
        close(outputs(found, [[3], [2, 0, 7]], 3), outputs(plain, [[3], [2, 0, 7]], 3))
    inner = Span(2, 3)
    close(outputs(flat.narrowed(Span(1, 3)).narrowed(inner), [[2]], 2), outputs(model.narrowed(inner), [[2]], 2))

    @given(LENGTHS, st.integers(1, 3))
    @settings(slow, max_examples=10)
    def batches(sessions, steps):
        close(outputs(flat, sessions, steps), outputs(model, sessions, steps))

    batches()


def test_products_of_prepacked_weights_stay_calls(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    expected = outputs(model, [[3], [2, 2]], 3)
    monkeypatch.setattr("swarm.models.weights.frozen_linear.MIN_FP32_WEIGHTS", 0)
    prepack(model.module)
    close(outputs(flat_of(model), [[3], [2, 2]], 3), expected)


@pytest.mark.parametrize(("family", "saved"), [("llama", 6), ("gemma2", 6), ("gpt_oss", 0)])
def test_fewer_calls_compute_the_same_bits(family, saved, tmp_path_factory):
    model = load(family, tmp_path_factory)
    fewer, all_calls = with_fewer_calls(trace_span(model)), trace_span(model)
    many = model.with_strategy(replace(model.strategy, flat=divide(all_calls, len(model.layers))))
    assert outputs(flat_of(model), [[3], [2, 1]], 3).equal(outputs(many, [[3], [2, 1]], 3))
    assert len(fewer.graph.nodes) <= len(all_calls.graph.nodes) - saved * len(model.layers)
