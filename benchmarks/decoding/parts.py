"""What parts of a span cost, and what steps of different parts gain by sharing a pass.

    python -m benchmarks.decoding.parts [--shape small] [--blocks 12]

In one process, without network: decode steps of sessions of 64 positions, fp32, one torch thread, in turns. First one
and eight sessions pass the span as one part, as two, and as four, one after the other. Then eight sessions of the whole
span meet four of its first half and four of its second half, in three passes and in one.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model
from swarm.data_structures import Span, StepLayout
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_forward
from swarm.models.loading.span_loading import load_span

CPU = torch.device("cpu")

PAST = 64
"""Positions of each session."""


def open_sessions(model: SpanModel, span: Span, count: int) -> list[SessionCache]:
    """Sessions of some blocks, with a past."""
    found = [SessionCache(model.narrowed(span)) for _ in range(count)]
    for cache in found:
        cache.step(torch.randn(PAST, model.hidden_size), StepLayout((0,), (PAST,)))
    return found


def one_pass(caches: list[SessionCache]) -> None:
    """A step of one token of each session, always at the same position."""
    steps = [cache.start_step(torch.randn(1, cache.model.hidden_size), StepLayout((PAST,), (1,))) for cache in caches]
    advance_steps([(step, 1) for step in steps])
    for step in steps:
        step.commit()


def in_passes(*passes: list[SessionCache]) -> Callable[[], None]:
    """A step of each session, one pass after the other."""

    def step() -> None:
        for caches in passes:
            one_pass(caches)

    return step


def cut(model: SpanModel, parts: int, sessions: int) -> Callable[[], None]:
    """A step of sessions that pass the span in equal parts."""
    edges = [round(model.span.length * number / parts) for number in range(parts + 1)]
    spans = [Span(start, end) for start, end in itertools.pairwise(edges)]
    return in_passes(*(open_sessions(model, span, sessions) for span in spans))


def meeting(model: SpanModel) -> dict[str, Callable[[], None]]:
    """Sessions of the whole span and of its halves: in one pass, and apart."""
    blocks, half = model.span.length, model.span.length // 2
    whole = open_sessions(model, Span(0, blocks), 8)
    head, tail = (open_sessions(model, span, 4) for span in (Span(0, half), Span(half, blocks)))
    return {"8 whole, 4 + 4 halves: one pass": in_passes([*whole, *head, *tail]), "apart": in_passes(whole, head, tail)}


def measure(report: Report, ways: Mapping[str, Callable[[], None]]) -> None:
    """Each way in turn: its milliseconds, and how many times as long as the first one it takes."""
    for step in ways.values():
        for _ in range(3):
            step()
    for _ in report.rounds(next(iter(ways))):
        first = None
        for name, step in ways.items():
            began = time.perf_counter()
            step()
            taken = time.perf_counter() - began
            first = first or taken
            report.add("ms", 1e3 * taken, "less", where=name)
            report.add("times the first", taken / first, "less", decides=True, where=name)


def main() -> None:
    parser = report_parser(__doc__, repeats=30)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--blocks", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(make_model(arguments.shape, Path(folder)))
        span = Span(0, min(arguments.blocks, checkpoint.blocks))
        model = choose_forward(load_span(checkpoint, span, dtype=torch.float32, device=CPU))
    with Report(arguments) as report:
        report.note(f"{arguments.shape}, {span.length} blocks, {model.strategy}")
        for sessions in (1, 8):
            measure(
                report, {f"sessions: {sessions}, parts: {parts}": cut(model, parts, sessions) for parts in (1, 2, 4)}
            )
        measure(report, meeting(model))


if __name__ == "__main__":
    main()
