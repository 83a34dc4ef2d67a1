"""How fast a GPU decodes and computes prompts, beside what it could do at most."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from benchmarks.common.machine import version_of
from benchmarks.gpu.bench import Bench, Case, Found, NotHere
from swarm.cli.doctor import machine_checks
from swarm.data_structures import Span, StepLayout
from swarm.errors import InvalidOption
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_forward, choose_layout
from swarm.models.loading.random_span import llama_config, make_random_span
from swarm.models.weights.quantization import INT8, NF4, NONE, form_for_device
from swarm.server.compute.engine import MAX_ITERATION_TOKENS

FORMS = {"bf16": NONE, "8 bits": INT8, "4 bits": NF4}
GOALS = {("bf16", 1, 128): 1.25, ("8 bits", 1, 128): 1.5, ("4 bits", 1, 128): 1.5, ("bf16", 64, 4096): 1.5}
"""Largest time of a decode step of the 7B shape, relative to the time to read weights and cache."""

MIN_MATRIX_SHARE = 0.5
"""Of the matrix rate that a prompt should reach."""


@dataclass(frozen=True)
class Shape:
    """The size of a model's blocks, and how many of them are taken at most."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    blocks: int

    @property
    def block_weights(self) -> int:
        """Numbers in the matrices of a block."""
        attention = 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads)
        return int(attention) + 3 * self.hidden * self.intermediate

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a position's keys and values in a block, in 16 bits."""
        return 2 * 2 * self.hidden * self.kv_heads // self.heads


def _shapes(bench: Bench) -> tuple[Shape, Shape]:
    return bench.sized(
        (Shape("7B", 4096, 11008, 32, 32, 32), Shape("70B", 8192, 28672, 64, 8, 10)),
        (Shape("7B", 128, 256, 4, 4, 2), Shape("70B", 256, 512, 8, 2, 2)),
    )


def card(bench: Bench) -> list[Case]:
    """What there is."""
    return [
        Case("versions", partial(_versions, bench)),
        Case("memory", lambda: Found({"GB/s": bench.bandwidth() / 1e9})),
        *(Case(f"matrix {dtype}", partial(_matrix, bench, dtype))
          for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        Case("swarm doctor", lambda: Found({"says": machine_checks.check_execution(bench.device.type).found})),
    ]  # fmt: skip


def _versions(bench: Bench) -> Found:
    packages = {name: version_of(name) for name in ("torch", "transformers", "bitsandbytes")}
    values: dict[str, float | int | str] = {"python": platform.python_version(), **packages}
    if bench.real:
        properties = torch.cuda.get_device_properties(bench.device)
        values |= {"GPU": properties.name, "memory GB": properties.total_memory / 1e9, "CUDA": str(torch.version.cuda)}
    return Found(values)


def _matrix(bench: Bench, dtype: torch.dtype) -> Found:
    return Found({"TFLOP/s": bench.matrix_rate(dtype) / 1e12})


@cache
def _rates(bench: Bench) -> tuple[float, float]:
    return bench.bandwidth(), bench.matrix_rate(torch.bfloat16)


_loaded: dict[tuple[str, str], SpanModel] = {}
"""The span that was made last, for cases that follow each other."""


def _span(bench: Bench, shape: Shape, form: str) -> SpanModel:
    """As many blocks as may take a third of the free memory, computed as a server would. Raises `NotHere`."""
    if (shape.name, form) not in _loaded:
        _loaded.clear()
        blocks = min(shape.blocks, int(bench.free_bytes() / 3 // (2 * shape.block_weights)))
        if not blocks:
            raise NotHere(f"a block takes {2 * shape.block_weights / 1e9:.1f} GB, and a third of the memory is less")
        config = llama_config(shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, blocks)
        quant = form_for_device(bench.device, FORMS[form])
        try:
            model = make_random_span(config, dtype=torch.bfloat16, device=bench.device, quant=quant)
        except InvalidOption as error:
            raise NotHere(str(error)) from error
        layout = choose_layout(model, bench.sized("auto", "paged"))
        _loaded[shape.name, form] = choose_forward(layout, bench.recorder())
    return _loaded[shape.name, form]


def decode(bench: Bench) -> list[Case]:
    """Decode steps beside the time to read weights and cache; those with a goal first."""
    sizes = bench.sized(((1, 128), (1, 4096), (1, 32768), (8, 4096), (64, 128), (64, 4096)), ((1, 128), (3, 128)))
    return [
        Case(f"{shape.name} {form}, batch {batch}, context {past}", partial(_decode, bench, shape, form, batch, past))
        for shape, form, (batch, past) in itertools.product(_shapes(bench), FORMS, sizes)
    ]


def _decode(bench: Bench, shape: Shape, form: str, batch: int, past: int) -> Found:
    whole = _span(bench, shape, form)
    fitting = int(0.85 * bench.free_bytes() // (batch * (past + 512) * shape.cache_bytes_per_token))
    blocks = min(whole.span.length, fitting)
    if not blocks:
        raise NotHere("the cache of one block does not fit")
    if whole.strategy.paging is None and batch * past > 1 << 18:
        raise NotHere("contiguous caches have to be computed, which takes too long for so many positions")
    strategy = whole.strategy
    if strategy.paging is not None:  # a pool of its own, which has no layers of blocks that are not computed
        strategy = replace(strategy, paging=replace(strategy.paging, pool=PagePool()))
    part = whole if blocks == whole.span.length else whole.narrowed(Span(0, blocks))
    model = part.with_strategy(strategy)  # which a part would have without recordings
    if strategy.paging is not None:
        strategy.paging.pool.reserve(batch * (past + 2 * PAGE_POSITIONS))
    sessions = [_with_past(model, past) for _ in range(batch)]
    token = torch.randn(1, model.hidden_size, device=bench.device).to(model.dtype)

    def step() -> None:
        works = [one.start_step(token, StepLayout(one.lengths, (1,))) for one in sessions]
        advance_steps([(work, 1) for work in works])
        for work in works:
            work.commit()

    seconds = bench.seconds(step)
    held = whole.weight_bytes * blocks / whole.span.length + blocks * batch * past * shape.cache_bytes_per_token
    ratio = seconds * _rates(bench)[0] / held
    limit = GOALS.get((form, batch, past)) if shape.name == "7B" else None
    values: dict[str, float | int | str] = {
        "blocks": blocks,
        "ms": seconds * 1e3,
        "x reading weights and cache": ratio,
        "tokens/s": batch / seconds,
        "by": str(model.strategy),
    }
    return Found(values, f"at most {limit} x reading" if limit else "", limit is None or ratio <= limit)


def _with_past(model: SpanModel, past: int) -> SessionCache:
    """A session of one sequence with `past` positions, whose keys and values are zeros in a paged cache."""
    session, layout = SessionCache(model), StepLayout((0,), (past,))
    hidden = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device).expand(past, -1)
    if model.strategy.paging is None:
        session.step(torch.randn_like(hidden), layout)
    else:
        session.start_step(hidden, layout).commit()
    return session


def prefill(bench: Bench) -> list[Case]:
    """Prompts beside the rate of matrix products."""
    places = itertools.product(_shapes(bench), bench.sized((512, 8192, 32768), (64, 300)))
    return [Case(f"{shape.name}, {tokens} tokens", partial(_prefill, bench, shape, tokens)) for shape, tokens in places]


def _prefill(bench: Bench, shape: Shape, tokens: int) -> Found:
    whole = _span(bench, shape, "bf16")
    model = whole.narrowed(Span(0, min(8, whole.span.length)))
    hidden = torch.randn(tokens, model.hidden_size, device=bench.device).to(model.dtype)

    def compute() -> None:
        """A prompt in chunks, as the engine computes it."""
        step = SessionCache(model).start_step(hidden, StepLayout((0,), (tokens,)))
        while step.tokens_left:
            advance_steps([(step, min(MAX_ITERATION_TOKENS, step.tokens_left))])
        step.commit()

    seconds = bench.seconds(compute, 3)
    attention = 2 * 2 * shape.hidden * tokens * tokens / 2  # scores and sums, of which a half is masked
    rate = model.span.length * (2 * shape.block_weights * tokens + attention) / seconds
    share = rate / _rates(bench)[1]
    values: dict[str, float | int | str] = {
        "blocks": model.span.length,
        "ms": seconds * 1e3,
        "tokens/s": tokens / seconds,
        "share of the matrix rate": share,
    }
    return Found(values, f"at least {MIN_MATRIX_SHARE} of the matrix rate", share >= MIN_MATRIX_SHARE)
