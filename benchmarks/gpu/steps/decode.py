"""Decode steps of spans of 7B and 70B shape, beside the time to read the weights and the cache."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from benchmarks.gpu import spans
from benchmarks.gpu.bench import Bench, Case, NotHere, Step
from benchmarks.gpu.records import Goal, Measured
from benchmarks.gpu.steps.card import read_bandwidth
from swarm.models.execution.span_model import SpanModel
from swarm.models.weights.quantization import INT8, NF4, NONE, form_for_device

FORMS = {"bf16": NONE, "8 bits": INT8, "4 bits": NF4}
BATCHES = (1, 8, 32, 64)
CONTEXTS = {"128": 128, "4k": 4096, "32k": 32768}
SMALL_CONTEXTS = {"128": 128, "4k": 300}
MEASURED_S = 0.4
"""How long the steps of one case are repeated."""

GOALS = {("bf16", 1, "128"): 1.25, ("8 bits", 1, "128"): 1.5, ("4 bits", 1, "128"): 1.5, ("bf16", 64, "4k"): 1.5}
"""Largest time of a step of the 7B shape in its best way, relative to reading weights and cache."""

Place = tuple[str, str, int, str, str]
"""Shape, form of the weights, batch, context, way."""


def _cases(bench: Bench) -> list[Case]:
    return [
        Case(f"{shape} {form}, batch {batch}, context {context}, {way}", partial(_decode, place=place), 1.5)
        for place in _places(bench)
        for shape, form, batch, context, way in [place]
    ]


STEP = Step("decode", "Decode steps", 115.0, _cases)


def _places(bench: Bench) -> list[Place]:
    """All cases, those with a goal first and then as the models follow each other, so that each is loaded once."""
    contexts = bench.sized(CONTEXTS, SMALL_CONTEXTS)
    batches = bench.sized(BATCHES, (1, 8))
    every = [
        (shape, form, batch, context, way)
        for shape, form in itertools.product(spans.SHAPES, FORMS)
        for context, batch, way in itertools.product(contexts, batches, reversed(spans.WAYS))
    ]
    few = [place for place in every if place[0] == "7B" or place[2:4] == (1, "128")]
    return sorted(bench.sized(every, few), key=_importance)


def _importance(place: Place) -> tuple[bool, str, int, bool]:
    shape, form, batch, context, _ = place
    return shape != "7B", form if shape != "7B" else "", list(FORMS).index(form), (form, batch, context) not in GOALS


def _decode(bench: Bench, place: Place) -> Measured:
    shape_name, form, batch, context, way = place
    quant = form_for_device(bench.device, FORMS[form])
    model = bench.keep((shape_name, form), lambda: spans.load(bench, shape_name, quant))
    past = bench.sized(CONTEXTS, SMALL_CONTEXTS)[context]
    blocks = _fitting_blocks(bench, model, shape_name, batch * (past + 512))
    part = spans.in_way(model, way, blocks)
    if way == "plain" and batch * past > 1 << 18:
        raise NotHere("contiguous caches have to be computed, which takes too long for so many positions")
    sessions = spans.sessions_with_past(part, batch, past)
    inputs = torch.randn(1, model.hidden_size, device=bench.device).to(model.dtype)
    times = spans.step_times(bench, lambda: spans.decode_together(sessions, inputs), 3, MEASURED_S)
    weights = int(model.weight_bytes * blocks / model.span.length)
    cache = blocks * batch * past * spans.shape_of(bench, shape_name).cache_bytes_per_token
    reading = (weights + cache) / bench.rate("memory", "bandwidth", read_bandwidth)
    step_ms = spans.median_ms(times)
    values: dict[str, float | int | str] = {
        "blocks": blocks,
        "weights GB": weights / 1e9,
        "cache GB": cache / 1e9,
        "ms a step": step_ms,
        "ms to read": reading * 1e3,
        "ratio": step_ms / reading / 1e3,
        "tokens/s": batch / step_ms * 1e3,
    }
    goal = GOALS.get((form, batch, context)) if shape_name == "7B" and way == "graphed" else None
    graphs = part.graphs
    note = "recording failed, so these steps are plain ones" if graphs is not None and not graphs.works else ""
    return Measured(values, Goal("ratio", goal) if goal is not None else None, note)


def _fitting_blocks(bench: Bench, model: SpanModel, shape_name: str, positions: int) -> int:
    """How many blocks can have a cache of so many positions. Raises `NotHere` if not even one can."""
    torch.cuda.empty_cache()
    per_block = positions * spans.shape_of(bench, shape_name).cache_bytes_per_token
    fitting = int(spans.MEMORY_SHARE * bench.free_bytes() // per_block)
    if not fitting:
        free = bench.free_bytes()
        raise NotHere(f"the cache of one block takes {per_block / 1e9:.0f} GB, and {free / 1e9:.0f} are free")
    return min(model.span.length, fitting)
