"""How fast this server computes, measured on the blocks that it has just loaded.

The whole span is measured, as it will serve: blocks of one model may differ (dense or mixture of experts, full or
sliding attention), and what a step costs beyond its blocks (masks, rotary tables, Python) is shared by all of them, so
one block alone would seem slower than it is.
"""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from swarm.common import console
from swarm.common.dtypes import dtype_name
from swarm.common.version import VERSION
from swarm.data_structures import Span, StepLayout
from swarm.models.block_loading import return_freed_memory
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.server.throughput import throughput_cache
from swarm.server.throughput.throughput_cache import MeasurementConditions, Throughput, ThroughputOption

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
MEASURED_STEPS = 8
MAX_DECODE_S = 1.0
"""Seconds for the decode steps. A machine that needs longer for a single step is measured by fewer."""

BATCH_TOKENS = (16, 64, 256, 1024)
"""Tokens computed at once, from small to large, as far as the budget goes."""

SEQUENCE_TOKENS = 128
"""Tokens of one row of a batch: attention scores, which grow with its square, then take little memory."""

MAX_FORWARD_S = 1.0
REPEATS_PER_BATCH = 3

FLASH_BATCH_TOKENS = 256
"""Tokens computed at once for blocks on flash, once: most of the time goes into reading, whatever the number."""


def determine_throughput(
    option: ThroughputOption,
    model: SpanModel,
    name: str,
    revision: str,
    quantization: str = "none",
    cache: Path | None = None,
    progress: bool = False,
) -> Throughput:
    """The throughput to announce for the loaded span: as given, as remembered, or measured now.

    A number that was given counts for both rates: what computes single tokens so fast computes batches no slower.
    Runs in the compute thread, whose number of threads is part of the conditions.

    Args:
        option: see `ThroughputOption`.
        name, revision: the model's, as announced.
        quantization: form of the weights, as announced.
        cache: file of remembered results (`throughput_cache.default_path`); None to remember nothing.
        progress: show progress on the terminal.
    """
    if option.rate is not None:
        return _reported(Throughput(option.rate, option.rate), model, "as given")
    conditions = _conditions(model.span, model.device, model.dtype, name, revision, quantization)
    if cache is not None and not option.remeasure:
        known = throughput_cache.lookup(cache, conditions, time.time())
        if known is not None:
            return _reported(known, model, "measured before; --throughput measure does it again")
    found = measure_throughput(model, progress)
    if cache is not None:
        throughput_cache.remember(cache, conditions, found, time.time())
    return _reported(found, model, "measured")


def remembered_throughput(
    span: Span,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    revision: str,
    quantization: str = "none",
    cache: Path | None = None,
) -> Throughput | None:
    """What was measured for these blocks before they are loaded now; None if nothing was."""
    if cache is None:
        return None
    conditions = _conditions(span, device, dtype, name, revision, quantization)
    return throughput_cache.lookup(cache, conditions, time.time())


def measure_throughput(model: SpanModel, progress: bool = False) -> Throughput:
    """Measure the span on its device, in a few seconds at most unless a single step takes so long.

    Inputs are random: equal tokens would all go to the same experts, whose weights are then read once for all.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(rows: int, length: int) -> torch.Tensor:
        hidden_RTH = torch.randn(rows, length, model.hidden_size, generator=generator)
        return hidden_RTH.to(model.device, model.dtype)

    title = "Measuring throughput" if progress else None
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
    return Throughput(model.span.length / step, model.span.length / token)


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


def _reported(found: Throughput, model: SpanModel, source: str) -> Throughput:
    logger.info(
        "Throughput: %.0f blocks/s (%.0f tokens/s), %.0f in batches; %s",
        found.decode,
        found.decode / model.span.length,
        found.forward,
        source,
    )
    return found


def _conditions(
    span: Span, device: torch.device, dtype: torch.dtype, name: str, revision: str, quantization: str
) -> MeasurementConditions:
    packages = ("torch", "transformers")
    return MeasurementConditions(
        hardware=_hardware(device),
        model=name,
        revision=revision,
        blocks=str(span),
        dtype=dtype_name(dtype),
        quantization=quantization,
        versions=", ".join([f"swarm {VERSION}", *(f"{package} {version(package)}" for package in packages)]),
    )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    with suppress(OSError):  # no Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name = line.partition(":")[2].strip()
            if line.startswith("model name") and name:
                return name
    return platform.processor() or platform.machine()
