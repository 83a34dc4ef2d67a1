"""Frequencies of texts of different lengths in one forward, in portions, and behind each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.data_structures import Span, StepLayout
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.gradients import forward_with_graph
from swarm.models.execution.session_cache import SessionCache, advance_steps, forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.models.execution.test_session_cache import HIDDEN, close
from tests.models.execution.test_traced_forward import flat_of
from tests.test_text_lengths import LONG, MODELS, ORIGINAL, SHORT

HIDDEN_STATES = torch.randn(LONG + 8, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[(name, layout) for name in MODELS for layout in ("contiguous", "paged")])
def model(request, tmp_path_factory) -> SpanModel:
    (family, overrides), layout = MODELS[request.param[0]], request.param[1]
    folder = tmp_path_factory.mktemp("model")
    zoo.make_model(family, **overrides).save_pretrained(folder)
    loaded = load_span(
        open_checkpoint(folder), Span(1, 4), dtype=torch.float32, device=torch.device("cpu"), layout=layout
    )
    assert loaded.strategy.layout == layout
    return loaded


def start(model: SpanModel, tokens: int, first: int = 0, length: int | None = None, cache: SessionCache | None = None):
    cache = cache or SessionCache(model)
    layout = StepLayout((first,), (tokens,), rope_lengths=(length,) if length else None)
    return cache, cache.start_step(HIDDEN_STATES[first : first + tokens], layout)


def outputs(step, portion: int | None = None) -> torch.Tensor:
    while step.tokens_left:
        advance_steps([(step, min(step.tokens_left, portion or step.tokens_left))])
    step.commit()
    return step.output


def test_a_text_is_computed_as_if_it_were_alone(model):
    alone = [outputs(start(model, tokens, length=tokens)[1]) for tokens in (SHORT, LONG)]
    steps = [start(model, tokens, length=tokens)[1] for tokens in (SHORT, LONG, SHORT)]
    advance_steps([(step, step.tokens_left) for step in steps])
    assert [close(step.output, wanted) for step, wanted in zip(steps, (*alone, alone[0]), strict=True)] == [None] * 3


def test_a_text_is_computed_as_if_it_came_at_once(model):
    whole = outputs(start(model, LONG, length=LONG)[1])
    close(outputs(start(model, LONG, length=LONG)[1], portion=7), whole)
    cache, step = start(model, 9, length=LONG)
    first = outputs(step)
    close(torch.cat([first, outputs(start(model, LONG - 9, 9, LONG, cache)[1])]), whole)
    layout = StepLayout((0, 0), (LONG, SHORT))
    inputs = torch.cat([HIDDEN_STATES[:LONG], HIDDEN_STATES[:SHORT]])
    both = torch.cat([whole, outputs(start(model, SHORT)[1])])
    close(forward_without_cache(model, inputs, replace(layout, rope_lengths=layout.ends)), both)
    close(forward_with_graph(model, inputs, replace(layout, rope_lengths=layout.ends)).detach(), both)


def test_single_tokens_are_computed_as_if_each_were_alone(model):
    wanted = []
    for tokens in (SHORT, LONG):
        cache, step = start(model, tokens, length=tokens)
        outputs(step)
        wanted.append(outputs(start(model, 1, tokens, cache=cache)[1]))
    caches = []
    for tokens in (SHORT, LONG):
        cache, step = start(model, tokens, length=tokens)
        outputs(step)
        caches.append(cache)
    steps = [start(model, 1, tokens, cache=cache)[1] for tokens, cache in zip((SHORT, LONG), caches, strict=True)]
    advance_steps([(step, 1) for step in steps])
    close(torch.cat([step.output for step in steps]), torch.cat(wanted))


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_forward_computes_no_long_texts(name, tmp_path_factory):
    family, overrides = MODELS[name]
    folder = tmp_path_factory.mktemp("model")
    zoo.make_model(family, **overrides).save_pretrained(folder)
    plain = load_span(open_checkpoint(folder), Span(1, 4), dtype=torch.float32, device=torch.device("cpu"))
    flat = flat_of(plain)
    for tokens in (LONG, SHORT, ORIGINAL):
        close(outputs(start(flat, tokens, length=tokens)[1]), outputs(start(plain, tokens, length=tokens)[1]))
