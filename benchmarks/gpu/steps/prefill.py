"""Prompts beside the card's matrix rate, and prompts and single tokens in one iteration as the scheduler mixes them."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import spans
from benchmarks.gpu.bench import Bench, Case, Step
from benchmarks.gpu.records import Goal, Measured
from benchmarks.gpu.steps.card import matrix_rate
from swarm.data_structures import StepLayout
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.server.compute.engine import MAX_ITERATION_TOKENS

PROMPTS = {"512": 512, "8k": 8192, "32k": 32768}
SMALL_PROMPTS = {"512": 64, "8k": 300}
MIN_SHARE = 0.5
"""Of the matrix rate that a prompt should reach."""

BLOCKS = 8
"""Blocks that are measured: a prompt takes as long in each."""


def _cases(bench: Bench) -> list[Case]:
    prompts = [
        Case(f"{shape}, {name} tokens", partial(_prefill, shape_name=shape, prompt=name), 3.0)
        for shape in spans.SHAPES
        for name in bench.sized(PROMPTS, SMALL_PROMPTS)
    ]
    mixed = [
        Case(f"7B, {sessions} tokens and a prompt's chunk of {chunk}", partial(_mixed, sessions=sessions, chunk=chunk))
        for sessions, chunk in bench.sized(((32, 0), (32, 512), (32, 2048), (0, 2048)), ((4, 0), (4, 32)))
    ]
    return prompts[: len(prompts) // 2] + mixed + prompts[len(prompts) // 2 :]


STEP = Step("prefill", "Prompts", 40.0, _cases)


def _blocks(bench: Bench) -> int:
    return bench.sized(BLOCKS, 2)


def _prefill(bench: Bench, shape_name: str, prompt: str) -> Measured:
    model = bench.keep(shape_name, lambda: spans.load(bench, shape_name))
    tokens = bench.sized(PROMPTS, SMALL_PROMPTS)[prompt]
    blocks = min(_blocks(bench), model.span.length)
    way = "paged" if model.strategy.paging is not None else "plain"
    part = spans.in_way(model, way, blocks)
    hidden = torch.randn(tokens, model.hidden_size, device=bench.device).to(model.dtype)

    def compute() -> None:
        """A prompt in chunks, as the engine computes it."""
        step = SessionCache(part).start_step(hidden, StepLayout((0,), (tokens,)))
        while step.tokens_left:
            advance_steps([(step, min(MAX_ITERATION_TOKENS, step.tokens_left))])
        step.commit()

    times = spans.step_times(bench, compute, 1, 1.0)
    shape = spans.shape_of(bench, shape_name)
    products = 2 * shape.block_weights * tokens
    attention = 2 * 2 * shape.hidden * tokens * tokens / 2  # scores and sums, of which a half is masked
    rate = blocks * (products + attention) / spans.median_ms(times) * 1e3
    highest = bench.rate("matrix bf16", "rate", matrix_rate)
    values: dict[str, float | int | str] = {
        "blocks": blocks,
        "ms": spans.median_ms(times),
        "tokens/s": tokens / spans.median_ms(times) * 1e3,
        "TFLOP/s": rate / 1e12,
        "share of the matrix rate": rate / highest,
    }
    return Measured(values, Goal("share of the matrix rate", MIN_SHARE, at_least=True), f"{way} cache")


def _mixed(bench: Bench, sessions: int, chunk: int) -> Measured:
    """One iteration: a token of each session, and a chunk of a prompt that has begun."""
    model = bench.keep("7B", lambda: spans.load(bench, "7B"))
    way = "paged" if model.strategy.paging is not None else "plain"
    part = spans.in_way(model, way, min(_blocks(bench), model.span.length))
    past = bench.sized(1024, 40)
    decoding = spans.sessions_with_past(part, sessions, past)
    prompting = spans.sessions_with_past(part, 1, past) if chunk else []
    token = torch.randn(1, model.hidden_size, device=bench.device).to(model.dtype)

    def iterate() -> None:
        works = [(one.start_step(token, StepLayout(one.lengths, (1,))), 1) for one in decoding]
        works += [(one.start_step(token.expand(chunk, -1), StepLayout((past,), (chunk,))), chunk) for one in prompting]
        advance_steps(works)
        for work, _ in works:
            work.commit()

    step_ms = spans.median_ms(spans.step_times(bench, iterate, 2, 0.5))
    return Measured({"ms": step_ms, "tokens/s": (sessions + chunk) / step_ms * 1e3}, note=f"{way} cache")
