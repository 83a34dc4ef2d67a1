"""Spans of random weights for the steps, and sessions with a past that nothing had to be computed for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.bench import Bench, NotHere
from swarm.data_structures import Span, StepLayout
from swarm.models.attention.page_pool import PagePool
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.execution.trials.layout_trials import choose_layout
from swarm.models.loading.random_span import llama_config, make_random_span
from swarm.models.weights.quantization import NONE


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


SHAPES = {
    "7B": Shape("7B", 4096, 11008, 32, 32, 32),
    "70B": Shape("70B", 8192, 28672, 64, 8, 10),
}
SMALL = {
    "7B": Shape("7B, small", 128, 256, 4, 4, 2),
    "70B": Shape("70B, small", 256, 512, 8, 2, 2),
}

MEMORY_SHARE = 0.85
"""Part of the free memory that a case may fill with its cache."""


def shape_of(bench: Bench, name: str) -> Shape:
    """A shape, or its small likeness where there is no card."""
    return bench.sized(SHAPES, SMALL)[name]


def load(bench: Bench, name: str, quant: str = NONE, dtype: torch.dtype = torch.bfloat16) -> SpanModel:
    """As many blocks as may take a third of the free memory, computed in the way that the product chooses."""
    shape = shape_of(bench, name)
    fitting = int(bench.free_bytes() / 3 // (2 * shape.block_weights))
    blocks = min(shape.blocks, fitting)
    if blocks < 1:
        raise NotHere(f"a block takes {2 * shape.block_weights / 1e9:.1f} GB, and a third of the memory is less")
    config = llama_config(shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, blocks)
    model = make_random_span(config, dtype=dtype, device=bench.device, quant=quant)
    return choose_forward(choose_layout(model))


WAYS = ("plain", "paged", "graphed")
"""plain: contiguous caches. paged: one pool of pages, one kernel for all sequences. graphed: that, recorded."""


def in_way(model: SpanModel, way: str, blocks: int) -> SpanModel:
    """The first blocks of a model computed in one of `WAYS`, with no sequence in its pool yet.

    Raises `NotHere` if the trials have found that this way does not work on this card; the message says why.
    """
    part = model.narrowed(Span(model.span.start, model.span.start + blocks))
    if way == "plain":
        return part.with_strategy(ExecutionStrategy("contiguous"))
    found = model.strategy
    if found.paging is None:
        raise NotHere(f"not used on this card: {why(model)}")
    if way == "graphed" and found.graph_recorder is None:
        raise NotHere(f"not used on this card: {why(model)}")
    recorder = found.graph_recorder if way == "graphed" else None
    paging = replace(found.paging, pool=PagePool(found.paging.pool.page_size))
    return part.with_strategy(ExecutionStrategy("paged", paging, graph_recorder=recorder))


def why(model: SpanModel) -> str:
    """Which way the trials have taken, and why they have left others."""
    trials = "; ".join(str(one) for one in model.strategy.trials)
    return f"{model.strategy} ({trials})" if trials else str(model.strategy)


def sessions_with_past(model: SpanModel, count: int, past: int) -> list[SessionCache]:
    """Sessions of one sequence with `past` positions, whose keys and values are zeros in a paged cache."""
    sessions = [SessionCache(model) for _ in range(count)]
    paging = model.strategy.paging
    if paging is not None:
        page = paging.pool.page_size
        paging.pool.reserve(count * (-(-(past + 2 * page) // page)) * page)
    for session in sessions:
        hidden = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device)
        if paging is not None:
            layout = StepLayout((0,), (past,))
            session.start_step(hidden.expand(past, -1), layout).commit()
        else:
            session.step(torch.randn(past, model.hidden_size, device=model.device).to(model.dtype), _whole(past))
    return sessions


def _whole(tokens: int) -> StepLayout:
    return StepLayout((0,), (tokens,))


def decode_together(sessions: Sequence[SessionCache], inputs: torch.Tensor) -> list[torch.Tensor]:
    """One token of every session's sequences in one step."""
    works = [one.start_step(inputs, StepLayout(one.lengths, (1,) * len(one.lengths))) for one in sessions]
    advance_steps([(work, work.tokens_left) for work in works])
    for work in works:
        work.commit()
    return [work.output for work in works]


def step_times(bench: Bench, step: Callable[[], object], least: int, seconds: float) -> list[float]:
    """Seconds of each of some steps, of which the first few are not counted: wall-clock time until all is computed."""
    times: list[float] = []
    began = time.monotonic()
    while len(times) < 3 + least or (time.monotonic() - began < seconds and len(times) < 60):
        torch.cuda.synchronize(bench.device)
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(bench.device)
        times.append(time.perf_counter() - start)
        if time.monotonic() - began > 4 * seconds and len(times) > 3:
            break
    return times[3:]


def median_ms(times: Sequence[float]) -> float:
    """The median in milliseconds."""
    return statistics.median(times) * 1e3
