"""Decode steps of one 7B-shaped span on a GPU, relative to the time of reading its weights at the card's bandwidth.

    python -m benchmarks.decoding.gpu_decode [--forms none,int8,nf4] [--batches 1,32] [--past 128] [--steps 50]
        [--json FILE]

A span of 8 blocks (hidden 4096, intermediate 11008, 32 heads) with random weights, in bfloat16 and quantized, is loaded
and run as by a server: with a paged cache and recorded CUDA graphs, or with what the server falls back to; the table
shows which. A batch is a number of sessions with one sequence each. A step's time is wall-clock time from passing in
the hidden states until the outputs are computed, including Python.

The bandwidth is the larger of that of a large copy on the card (bytes read and written) and of a large sum (bytes
read), measured before and after each form with CUDA events. Ratios use the highest bandwidth found, so that no result
looks better than it is.

`--device cpu --blocks 1 --hidden 256` tests the benchmark itself. Without a GPU it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import machine
from swarm.data_structures import Span, StepLayout
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.trials.forward_trials import choose_forward
from swarm.models.loading.random_span import llama_config
from swarm.models.loading.span_loading import load_span
from swarm.models.weights.quantization import form_for_device

TARGET = 1.5
"""Maximum time of a step, as a multiple of the time of reading the weights."""

WARM_UP = 10
"""Number of steps that are not counted: CUDA graphs are recorded in the first one."""

LARGE = {"cuda": 2 << 30, "cpu": 64 << 20}
"""Number of bytes copied and summed to measure the bandwidth: far more than any cache of the device holds."""


@dataclass(frozen=True)
class Result:
    """Measured steps of one form of the weights and one batch size.

    Attributes:
        way: the layout of the cache and how a step is executed.
        weights: size of the weights in bytes.
        reading: seconds that reading the weights takes.
        steps: seconds of each step.
    """

    form: str
    way: str
    batch: int
    weights: int
    reading: float
    steps: list[float]

    @property
    def ratio(self) -> float:
        """Median time of a step relative to reading the weights."""
        return statistics.median(self.steps) / self.reading


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Measure the bandwidth of the device's memory in bytes/s."""
    source = torch.ones(LARGE[device.type] // 4, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = min(_seconds(lambda: target.copy_(source), device) for _ in range(repeats))
    summed = min(_seconds(source.sum, device) for _ in range(repeats))
    return max(2 * size / copied, size / summed)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Measure seconds with the device's own clock if it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def make_checkpoint(folder: Path, hidden: int, intermediate: int, heads: int, blocks: int) -> Checkpoint:
    """Save a model with random bfloat16 weights, the same in every run."""
    torch.manual_seed(0)
    config = llama_config(hidden, intermediate, heads, heads, blocks, positions=4096)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return open_checkpoint(folder)


def step_times(model: SpanModel, batch: int, past: int, steps: int) -> list[float]:
    """Seconds of each step of `batch` sessions that start with `past` positions."""
    sessions = [SessionCache(model) for _ in range(batch)]

    def hidden(tokens: int) -> torch.Tensor:
        return torch.randn(tokens, model.hidden_size).to(model.device, model.dtype)

    for session in sessions:
        session.step(hidden(past), StepLayout((0,), (past,)))
    inputs = hidden(1)

    def step() -> None:
        works = [session.start_step(inputs, StepLayout(session.lengths, (1,))) for session in sessions]
        advance_steps([(work, 1) for work in works])
        for work in works:
            work.commit()

    times = []
    for number in range(WARM_UP + steps):
        _synchronize(model.device)
        began = time.perf_counter()
        step()
        _synchronize(model.device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - began)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    checkpoint: Checkpoint, device: torch.device, forms: Sequence[str], batches: Sequence[int], past: int, steps: int
) -> list[Result]:
    """Load the span in each form of the weights and decode with it."""
    found: list[tuple[str, str, int, int, list[float]]] = []
    rates = [bandwidth(device)]
    for form in forms:
        model = load_span(
            checkpoint,
            Span(0, checkpoint.blocks),
            dtype=torch.bfloat16,
            device=device,
            quant=form_for_device(device, form),
        )
        model = choose_forward(model)
        way = str(model.strategy)
        for batch in batches:
            times = step_times(model, batch, past, steps)
            stopped = model.graphs is not None and not model.graphs.works
            found.append((form, f"{way}, stopped" if stopped else way, batch, model.weight_bytes, times))
        del model
        rates.append(bandwidth(device))
    return [Result(form, way, batch, size, size / max(rates), times) for form, way, batch, size, times in found]


def report(results: Sequence[Result]) -> str:
    """Format medians and ranges as a table."""
    lines = [
        "| weights | MiB | cache, forward | batch | ms a step | ms to read the weights | ratio | target |",
        "|" + " --- |" * 8,
    ]
    for one in results:
        middle, least, most = (f(one.steps) * 1e3 for f in (statistics.median, min, max))
        met = "met" if one.ratio <= TARGET else "missed"
        lines.append(
            f"| {one.form} | {one.weights / 2**20:.0f} | {one.way} | {one.batch} | {middle:.2f} ({least:.2f} to "
            f"{most:.2f}) | {one.reading * 1e3:.2f} | {one.ratio:.2f} | {TARGET}: {met} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--forms", default="none,int8,nf4")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--past", type=int, default=128, help="positions that a row has at first")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_decode: not measured: no GPU here")
        return
    device = torch.device(arguments.device)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(
            Path(folder), arguments.hidden, arguments.intermediate, arguments.heads, arguments.blocks
        )
        results = measure(checkpoint, device, arguments.forms.split(","), batches, arguments.past, arguments.steps)
    where = machine.describe() | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
    print(", ".join(where.values()))
    print(report(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": where, "results": [asdict(one) for one in results]}, indent=2))


if __name__ == "__main__":
    main()
