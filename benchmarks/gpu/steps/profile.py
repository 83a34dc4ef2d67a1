"""Where the time of a decode step goes: its longest kernels, and the gaps between them."""

from __future__ import annotations

from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import spans
from benchmarks.gpu.bench import Bench, Case, Step
from benchmarks.gpu.records import Measured, Value

LONGEST = 10
STEPS = 5


def _cases(bench: Bench) -> list[Case]:
    places = bench.sized((("graphed", 1, 128), ("paged", 1, 128), ("graphed", 64, 4096)), (("graphed", 2, 20),))
    return [
        Case(f"7B bf16, batch {batch}, context {past}, {way}", partial(_profile, way=way, batch=batch, past=past), 4.0)
        for way, batch, past in places
    ]


STEP = Step("profile", "A decode step's kernels", 20.0, _cases)


def _profile(bench: Bench, way: str, batch: int, past: int) -> Measured:
    model = bench.keep("7B", lambda: spans.load(bench, "7B"))
    part = spans.in_way(model, way, min(bench.sized(4, 2), model.span.length))
    sessions = spans.sessions_with_past(part, batch, past)
    inputs = torch.randn(1, model.hidden_size, device=bench.device).to(model.dtype)
    for _ in range(4):
        spans.decode_together(sessions, inputs)
    torch.cuda.synchronize(bench.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.real else [])]
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            spans.decode_together(sessions, inputs)
        torch.cuda.synchronize(bench.device)
    kernels = [event for event in found.events() if _is_kernel(event, bench.real)]
    return Measured(_figures(kernels), note=_longest(kernels))


def _is_kernel(event: object, real: bool) -> bool:
    """Whether something ran on the card; without one, whether it is an operation of the processor."""
    on_card = getattr(event, "device_type", None) == torch.autograd.DeviceType.CUDA
    return on_card if real else str(getattr(event, "name", "")).startswith("aten::")


def _figures(kernels: list[object]) -> dict[str, Value]:
    """How many there are in a step, how long they take, and how long the card waits in between, in microseconds."""
    ranges = sorted((one.time_range.start, one.time_range.end) for one in kernels)  # type: ignore[attr-defined]
    gaps, end = 0.0, ranges[0][0] if ranges else 0.0
    for start, finish in ranges:
        gaps += max(0.0, start - end)
        end = max(end, finish)
    whole = end - ranges[0][0] if ranges else 0.0
    return {
        "kernels a step": len(kernels) / STEPS,
        "us a step": whole / STEPS,
        "us in gaps": gaps / STEPS,
        "share in gaps": gaps / whole if whole else 0.0,
    }


def _longest(kernels: list[object]) -> str:
    totals: dict[str, tuple[float, int]] = {}
    for one in kernels:
        name = str(one.name)  # type: ignore[attr-defined]
        length = one.time_range.end - one.time_range.start  # type: ignore[attr-defined]
        spent, count = totals.get(name, (0.0, 0))
        totals[name] = spent + length, count + 1
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:LONGEST]
    rows = [(name[:60], spent / STEPS, count / STEPS) for name, (spent, count) in ranked]
    return "; ".join(f"{name}: {spent:.0f} us, {count:.0f} times" for name, spent, count in rows)
