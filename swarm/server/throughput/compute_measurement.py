"""How fast this server computes, measured on the blocks that it has just loaded.

The whole span is measured, as it will serve: blocks of one model may differ (dense or mixture of experts, full or
sliding attention), and what a step costs beyond its blocks (masks, rotary tables, Python) is shared by all of them, so
one block alone would seem slower than it is.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from swarm.common import console
from swarm.common.machine import ProcessorUse
from swarm.data_structures import StepLayout
from swarm.models.block_loading import return_freed_memory
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
MEASURED_STEPS = 8
MAX_DECODE_S = 1.0
"""Seconds for the decode steps. A machine that needs longer for a single step is measured by fewer."""

BATCH_TOKENS = (16, 64, 256, 1024)
"""Tokens computed at once, from small to large, as far as the budget goes."""

SEQUENCE_TOKENS = 128
"""Tokens of one row of a batch: attention scores, which grow with its square, then take little memory."""

MAX_FORWARD_S = 0.25
REPEATS_PER_BATCH = 3

FLASH_BATCH_TOKENS = 256
"""Tokens computed at once for blocks on flash, once: most of the time goes into reading, whatever the number."""


@dataclass(frozen=True)
class Throughput:
    """What a server computes, in blocks x tokens per second (a span of n blocks does 1/n of it in tokens/s).

    Attributes:
        decode: in steps of one token.
        forward: where many tokens are computed at once (prefill, training).
        others: share of all processors that other programs used while this was measured.
    """

    decode: float
    forward: float
    others: float = 0.0


def determine_throughput(given: float | None, model: SpanModel, progress: bool = False) -> Throughput:
    """The throughput to announce for the loaded span: as given, or measured now. Runs in the compute thread.

    A number that was given counts for both rates: what computes single tokens so fast computes batches no slower.

    Args:
        given: blocks x tokens per second; None to measure.
        progress: show progress on the terminal.
    """
    found = measure_throughput(model, progress) if given is None else Throughput(given, given)
    logger.info(
        "Throughput: %.0f blocks/s (%.0f tokens/s), %.0f in batches; %s",
        found.decode,
        found.decode / model.span.length,
        found.forward,
        f"measured, while others used {found.others:.0%} of the processors" if given is None else "as given",
    )
    return found


def measure_throughput(model: SpanModel, progress: bool = False) -> Throughput:
    """Measure the span on its device, in a second or two unless a single step takes so long.

    Inputs are random: equal tokens would all go to the same experts, whose weights are then read once for all.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(rows: int, length: int) -> torch.Tensor:
        hidden_RTH = torch.randn(rows, length, model.hidden_size, generator=generator)
        return hidden_RTH.to(model.device, model.dtype)

    title, use = "Measuring throughput" if progress else None, ProcessorUse()
    with console.progress_bar(
        title, WARM_UP_STEPS + MEASURED_STEPS + len(BATCH_TOKENS) * REPEATS_PER_BATCH, "step"
    ) as bar:
        step = _decode_step(model, tokens, bar.update)
        try:
            if model.flash is not None:
                token = _forward_flash_token(model, tokens)
            else:
                token = _forward_token(model, tokens, bar.update)
        except torch.OutOfMemoryError:
            token = step  # not even the smallest batch fits
    return_freed_memory()  # the largest batch took more than any step will
    return Throughput(model.span.length / step, model.span.length / token, use.others())


def _decode_step(model: SpanModel, tokens: Callable[[int, int], torch.Tensor], moved_on: Callable[[], object]) -> float:
    """Seconds of a session's step of one token, computed as clients' steps are: the median of a few."""
    session = SessionCache(model)
    inputs = [tokens(1, 1)[0] for _ in range(WARM_UP_STEPS + MEASURED_STEPS)]
    times: list[float] = []
    for position, hidden_1H in enumerate(inputs):
        times.append(_timed(model, partial(session.step, hidden_1H, StepLayout((position,), (1,)))))
        moved_on()
        if len(times) > 1 and sum(times) > MAX_DECODE_S:
            break
    return statistics.median(times[min(WARM_UP_STEPS, len(times) - 1) :])


def _forward_token(
    model: SpanModel, tokens: Callable[[int, int], torch.Tensor], moved_on: Callable[[], object]
) -> float:
    """Seconds a token in the largest batch that the budget allows."""
    longest = min(SEQUENCE_TOKENS, model.positions or SEQUENCE_TOKENS)
    spent, best = 0.0, float("inf")
    for batch in BATCH_TOKENS:
        length = min(batch, longest)
        rows = batch // length
        hidden_RTH = tokens(rows, length)
        times: list[float] = []
        for _ in range(REPEATS_PER_BATCH):
            try:
                times.append(_timed(model, partial(model.forward, hidden_RTH)))
                moved_on()
            except torch.OutOfMemoryError:
                if best == float("inf"):
                    raise
                return best
            spent += times[-1]
            if spent > MAX_FORWARD_S:
                break
        best = min(best, statistics.median(times) / (rows * length))
        if spent + 4 * times[-1] > MAX_FORWARD_S:
            break
    return best


def _forward_flash_token(model: SpanModel, tokens: Callable[[int, int], torch.Tensor]) -> float:
    """Seconds a token in one batch whose weights are read from flash."""
    length = min(SEQUENCE_TOKENS, model.positions or SEQUENCE_TOKENS)
    rows = max(1, FLASH_BATCH_TOKENS // length)
    return _timed(model, partial(model.forward, tokens(rows, length))) / (rows * length)


def _timed(model: SpanModel, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began
