"""The server's engine with sessions that come and go: tokens/s, iterations, their cost beside the kernels, memory."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu import spans
from benchmarks.gpu.adapters import random_adapter
from benchmarks.gpu.bench import Bench, Case, Step, WrongResult
from benchmarks.gpu.records import Goal, Measured
from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.server.compute.compute_request import ForwardWork
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine, token_budget
from swarm.server.throughput.compute_measurement import measure_throughput

SESSIONS = 64
ADAPTER_SHARE = 3
"""One of so many sessions has an adapter."""

MAX_OVERHEAD_MS = 0.3
LOAD_S = 12.0
BLOCKS = 8


def _cases(bench: Bench) -> list[Case]:
    return [
        Case(f"{SESSIONS} sessions, a third with LoRA", partial(_load, adapters=True), LOAD_S + 6),
        Case(f"{SESSIONS} sessions without adapters", partial(_load, adapters=False), LOAD_S + 2),
        Case("overhead of an iteration", _overhead, 4.0),
        Case("throughput as announced", _throughput, 4.0),
    ]


STEP = Step("engine", "The engine under load", 45.0, _cases)


@dataclass
class _Meter:
    """What the engine said of its iterations: sequences, tokens and seconds of each."""

    iterations: list[tuple[int, int, float]] = field(default_factory=list)

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        self.iterations.append((sequences, tokens, seconds))

    def seconds(self, decode: bool) -> list[float]:
        """Of iterations of single tokens, or of the others."""
        return [seconds for sequences, tokens, seconds in self.iterations if (tokens <= sequences) == decode]


class _Clients:
    """Sessions that come, bring a prompt, some tokens, and go."""

    def __init__(self, bench: Bench, model: SpanModel, engine: Engine, adapters: Sequence[AdapterWeights]) -> None:
        self._bench, self._model, self._engine, self._adapters = bench, model, engine, adapters
        self.tokens = self.ended = 0
        self.waits: list[float] = []

    async def run(self, number: int, until: float) -> None:
        """One client after the other in this place, until the time is over."""
        choice = random.Random(number)
        while time.monotonic() < until:
            adapter = self._adapters[number // ADAPTER_SHARE % len(self._adapters)]
            mine = adapter if number % ADAPTER_SHARE == 0 else NO_ADAPTER
            cache = SessionCache(self._model, mine)
            prompt = self._bench.sized(choice.choice((64, 300, 1500)), choice.choice((3, 20)))
            counts = [prompt] + [1] * choice.randint(4, self._bench.sized(100, 6))
            for place, count in enumerate(counts):
                began = time.monotonic()
                if began >= until:
                    return
                await self._step(number, cache, count)
                if place:
                    self.waits.append(time.monotonic() - began)
                self.tokens += count if not place else 1
            self.ended += 1

    async def _step(self, number: int, cache: SessionCache, count: int) -> None:
        model = self._model
        hidden = torch.randn(count, model.hidden_size, dtype=torch.bfloat16)
        layout = StepLayout(cache.lengths or (0,), (count,))
        request = ForwardWork(
            f"peer {number}",
            number,
            cache,
            layout,
            decode=lambda: hidden.to(model.device),
            encode=lambda output: output[-1:].cpu().float().numpy().tobytes(),
        )
        result = await self._engine.compute(request)
        if len(result.payload) != 4 * model.hidden_size:
            raise WrongResult(f"a reply has {len(result.payload)} bytes")


def _model(bench: Bench) -> SpanModel:
    return bench.keep("7B", lambda: spans.load(bench, "7B"))


def _load(bench: Bench, adapters: bool) -> Measured:
    whole = _model(bench)
    blocks = min(bench.sized(BLOCKS, 2), whole.span.length)
    way = "graphed" if whole.strategy.graph_recorder is not None else "paged"
    model = spans.in_way(whole, way if whole.strategy.paging is not None else "plain", blocks)
    meter, thread, seconds = _Meter(), ComputeThread(), bench.sized(LOAD_S, 2.0)
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    made = [model.adapted.prepare(random_adapter(model, rank=16, seed=seed)) for seed in range(4)] if adapters else []
    try:
        clients = asyncio.run(_serve(bench, model, thread, meter, made, seconds))
    finally:
        thread.close()
        thread.thread.join(10)
    decoding, mixed = meter.seconds(True), meter.seconds(False)
    values: dict[str, float | int | str] = {
        "blocks": blocks,
        "tokens/s": clients.tokens / seconds,
        "sessions ended": clients.ended,
        "iterations": len(meter.iterations),
        "median sequences": statistics.median([one for one, _, _ in meter.iterations]),
        "ms a decode iteration": statistics.median(decoding) * 1e3 if decoding else 0.0,
        "ms a mixed iteration": statistics.median(mixed) * 1e3 if mixed else 0.0,
        "share of time computing": sum(one for _, _, one in meter.iterations) / seconds,
        "median ms a client waits": statistics.median(clients.waits) * 1e3 if clients.waits else 0.0,
        **_memory(bench, model, before),
    }
    return Measured(values, note=str(model.strategy))


async def _serve(
    bench: Bench,
    model: SpanModel,
    thread: ComputeThread,
    meter: _Meter,
    adapters: Sequence[AdapterWeights],
    seconds: float,
) -> _Clients:
    engine = Engine(thread, token_budget(bench.sized(50_000, 500)), inline=False, on_iteration=meter.note)
    clients = _Clients(bench, model, engine, adapters or [NO_ADAPTER])
    until = time.monotonic() + seconds
    await asyncio.gather(*(clients.run(number, until) for number in range(bench.sized(SESSIONS, 9))))
    return clients


def _memory(bench: Bench, model: SpanModel, before: int) -> dict[str, float | int | str]:
    """What the card has given, beside what the accountant counts for the pool's pages."""
    peak = torch.cuda.max_memory_allocated(bench.device)
    found: dict[str, float | int | str] = {"peak GB beyond the weights": (peak - before) / 1e9}
    paging = model.strategy.paging
    if paging is not None:
        shape = spans.shape_of(bench, "7B")
        positions = paging.pool.page_count * paging.pool.page_size
        counted = positions * shape.cache_bytes_per_token * model.span.length
        held = sum(one.numel() * one.element_size() for pair in paging.pool.layers.values() for one in pair)
        if not 0.9 * counted <= held <= 1.1 * counted:
            raise WrongResult(f"the pool has {held / 1e6:.1f} MB, and the accountant counts {counted / 1e6:.1f} MB")
        found |= {"pool GB": held / 1e9, "pool GB as counted": counted / 1e9}
    return found


def _overhead(bench: Bench) -> Measured:
    """What an iteration takes beside the kernels: the time of decode steps less the time of their graph alone."""
    whole = _model(bench)
    blocks = min(bench.sized(BLOCKS, 2), whole.span.length)
    part = spans.in_way(whole, "graphed", blocks)
    sessions = spans.sessions_with_past(part, bench.sized(32, 4), bench.sized(512, 20))
    inputs = torch.randn(1, whole.hidden_size, device=bench.device).to(whole.dtype)
    times = spans.step_times(bench, lambda: spans.decode_together(sessions, inputs), 5, 1.0)
    if part.graphs is None or not part.graphs.works:
        raise WrongResult("decode steps could not be recorded; the log says why")
    replays = [one.replay for one in part.graphs._recordings.values()]
    alone = spans.step_times(bench, replays[-1], 5, 1.0)
    step_ms, alone_ms = spans.median_ms(times), spans.median_ms(alone)
    values: dict[str, float | int | str] = {
        "sessions": len(sessions),
        "ms an iteration": step_ms,
        "ms of kernels": alone_ms,
        "ms beside kernels": step_ms - alone_ms,
    }
    return Measured(values, Goal("ms beside kernels", MAX_OVERHEAD_MS))


def _throughput(bench: Bench) -> Measured:
    """What a server would measure and announce for these blocks."""
    model = _model(bench)
    found = measure_throughput(model)
    values: dict[str, float | int | str] = {
        "blocks": model.span.length,
        "tokens/s one by one": found.decode / model.span.length,
        "tokens/s in batches": found.forward / model.span.length,
    }
    return Measured(values)
