"""Memory of each device of a ring that its starter sets up, and its tokens/s, relative to the model on one device.

    python -m benchmarks.decoding.memory [--model nano tinyllama] [--dtype bfloat16] [--tokens 32]

The partitions are those of MDI-LLM's tables I and II. The starter (`swarm.Ring`) is the only one that can read the
model; each worker (`swarm worker`) is a process in an empty folder, and gets its weights from the starter. A worker's
memory is that of all its processes: the one that waits, the server, and their libp2p daemons. Every process has one
torch thread. There are as many texts as devices, each in a lane of its own. The weights are random. In fp32 the
tokens have to be those of the model on one device; in bfloat16, both may round differently.

Memory is what is resident while texts are written, where pages that several processes share count once (PSS).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common.report import Report, report_parser
from benchmarks.common.tables import spread
from benchmarks.decoding.lanes import seconds_per_token
from swarm import Ring
from swarm.common.dtypes import HIDDEN_DTYPES
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.transport.p2p import quiet_hivemind

COMMON = {"intermediate_size": 5632, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
MODELS = {
    "nano": LlamaConfig(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, **COMMON),
    "tinyllama": LlamaConfig(hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, **COMMON),
}
"""NanoLlama (304 million parameters) and TinyLlama (1.1 billion), as described in the paper."""

RINGS = {"nano": ((5, 7), (2, 5, 5)), "tinyllama": ((10, 12), (6, 8, 8))}
"""Number of blocks of each device, the starter first."""

PAPER = {
    ("nano", 1): (2.15,),
    ("nano", 2): (1.76, 1.76),
    ("nano", 3): (1.34, 1.46, 1.46),
    ("tinyllama", 2): (4.57, 4.57),
    ("tinyllama", 3): (3.26, 3.26, 3.26),
}
"""GB of RAM and VRAM that the paper measured on Jetson boards, fp32."""

PROMPT = 1
"""Tokens of each prompt, as in the paper."""

MOST_TEXTS = max(len(blocks) for rings in RINGS.values() for blocks in rings)
MEGA = 1e6


@dataclass
class Device:
    """Memory in bytes: resident during generation, and what the model itself takes."""

    resident: int
    model: int


@dataclass
class MeasuredRing:
    """One partition.

    Attributes:
        blocks: of each device; one entry for the whole model on one device.
        rates: tokens/s of all texts together, by repeat.
        same: whether the tokens are those of the model on one device.
        start: seconds from the starter's first line until all workers serve; None on one device.
    """

    blocks: tuple[int, ...]
    devices: list[Device] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    same: bool = True
    start: float | None = None


def make_model(name: str, dtype: str, folder: Path) -> Path:
    """Save a model with random weights that never generates an end-of-text token."""
    torch.manual_seed(0)
    config = MODELS[name]
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=HIDDEN_DTYPES[dtype])
    model.save_pretrained(folder / name)
    del model
    gc.collect()
    return folder / name


def prompts(texts: int) -> torch.Tensor:
    """A token for each text."""
    return torch.arange(5, 5 + texts).view(texts, PROMPT)


def measured(run: Callable[[int], torch.Tensor], texts: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The tokens, tokens/s by repetition, and this process's memory."""
    written = run(tokens)  # warms up
    rates = [texts / seconds_per_token(run, tokens) for _ in range(repeats)]
    return {"tokens": written.tolist(), "rates": rates, "resident": resident(os.getpid())}


def alone(path: Path, dtype: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Run the whole model in this process, one text after the other."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=HIDDEN_DTYPES[dtype])

    def run(count: int) -> torch.Tensor:
        written = [model.generate(one[None], max_new_tokens=count, do_sample=False) for one in prompts(MOST_TEXTS)]
        return torch.cat(written)

    return measured(run, MOST_TEXTS, tokens, repeats)


def starter(path: Path, dtype: str, partition: str, tokens: int, repeats: int, folder: Path, lines: list[str]) -> None:
    """Be the starter of a ring of these workers, and tell how it was."""
    texts, began = partition.count("+") + 1, time.monotonic()
    ring = Ring(
        path,
        lines,
        partition,
        dtype=dtype,
        cache_tokens=1024,
        threads=1,
        folder=folder,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        wire="none",
    )
    with ring:
        start = time.monotonic() - began

        def run(count: int) -> torch.Tensor:
            return ring.model.generate(prompts(texts), max_new_tokens=count, do_sample=False, lanes=texts)

        tell({"start": start, **measured(run, texts, tokens, repeats)})  # while the workers serve


@contextmanager
def running_worker(folder: Path) -> Iterator[tuple[str, int]]:
    """`swarm worker` in an empty folder, without a hub and without a home: its line, and its process id."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "swarm.cli", "worker", "--folder", str(folder)]
    environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    listening = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    process = subprocess.Popen(
        [*command, *listening], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        line = next((one.strip() for one in process.stdout if one.startswith("swarm-worker:")), None)
        if line is None:
            raise RuntimeError("the worker ended before it printed its line")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # so that it never waits for its reader
        yield line, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def resident(pid: int) -> int:
    """Resident memory of a process and those that it has started; what they share counts once."""
    return sum(
        _shared_once(one) for one in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True)))
    )


def _shared_once(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def in_a_process(*arguments: object, until: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Run a part of this benchmark as a separate process, so that its memory can be measured alone.

    Args:
        until: called when the process has its result, before it ends.
    """
    command = [sys.executable, "-m", "benchmarks.decoding.memory", "--part", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        result = next((line for line in process.stdout if line.startswith("{")), None)
        if result is None:
            raise RuntimeError(f"part {arguments[0]} gave no result")
        until()
        process.stdin.close()
        process.stdout.read()
    return json.loads(result)


def bytes_of(path: Path, dtype: str, tokens: int) -> tuple[list[int], int]:
    """Of each block with the cache of all texts, and of embeddings, norm and head."""
    checkpoint = open_checkpoint(path)
    prints = memory_footprint(checkpoint, HIDDEN_DTYPES[dtype])
    cached = MOST_TEXTS * (PROMPT + tokens)
    blocks = [prints.span_bytes(block, block + 1, cached) for block in range(checkpoint.blocks)]
    heads = sum(tensor.numel() for _, tensor in checkpoint.read_tensors(checkpoint.is_client_tensor))
    return blocks, heads * HIDDEN_DTYPES[dtype].itemsize


def measure_ring(
    path: Path, dtype: str, tokens: int, blocks: tuple[int, ...], repeats: int, expected: list[list[int]]
) -> MeasuredRing:
    """Start the workers, and the starter."""
    ring = MeasuredRing(blocks)
    of_block, heads = bytes_of(path, dtype, tokens)
    edges = [sum(blocks[:device]) for device in range(len(blocks) + 1)]
    sizes = [sum(of_block[start:end]) for start, end in itertools.pairwise(edges)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        workers = [stack.enter_context(running_worker(root / str(number))) for number in range(1, len(blocks))]
        lines = [line for line, _ in workers]

        def look_at_workers() -> None:
            ring.devices += [Device(resident(pid), 0) for _, pid in workers]

        partition = "+".join(map(str, blocks))
        arguments = ("starter", path, dtype, partition, tokens, repeats, root / "starter", *lines)
        found = in_a_process(*arguments, until=look_at_workers)
    ring.devices.insert(0, Device(found["resident"], heads))
    for device, size in zip(ring.devices, sizes, strict=True):
        device.model += size
    ring.rates, ring.start = found["rates"], found["start"]
    ring.same = found["tokens"] == expected[: len(blocks)]
    return ring


def measure_alone(path: Path, dtype: str, tokens: int, repeats: int) -> tuple[MeasuredRing, list[list[int]]]:
    """Measure the whole model on one device; also the tokens that it writes."""
    found = in_a_process("alone", path, dtype, tokens, repeats)
    of_block, heads = bytes_of(path, dtype, tokens)
    size = sum(of_block) + heads
    device = Device(found["resident"], size)
    return MeasuredRing((len(of_block),), [device], found["rates"]), found["tokens"]


def empty() -> Device:
    """Memory of Python and the libraries alone."""
    found = in_a_process("empty")
    return Device(found["resident"], 0)


def table(name: str, dtype: str, rings: list[MeasuredRing], nothing: Device) -> str:
    """Format the results in Markdown."""
    lines = [
        f"{name}, {dtype}, as many texts as devices; MB a device, the starter's first; Python and the libraries alone "
        f"take {nothing.resident / MEGA:.0f}",
        "",
        "| devices | blocks | tokens | ready after, s | weights and cache | resident "
        "| resident over one device's | paper, GB | tokens/s | times one device |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    whole = rings[0]
    for ring in rings:
        share = max(device.resident for device in ring.devices) / whole.devices[0].resident
        paper = PAPER.get((name, len(ring.devices)))
        ratios = [rate / statistics.median(whole.rates) for rate in ring.rates]
        columns = (
            str(len(ring.devices)),
            " + ".join(map(str, ring.blocks)),
            "same" if ring.same else "OTHERS",
            f"{ring.start:.1f}" if ring.start is not None else "",
            *(" + ".join(f"{getattr(d, what) / MEGA:.0f}" for d in ring.devices) for what in ("model", "resident")),
            f"{share:.2f}",
            " + ".join(map(str, paper)) if paper else "does not fit",
            spread(ring.rates),
            spread(ratios),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def run_part(part: list[str]) -> None:
    """The main function of a process of this benchmark."""
    kind, *rest = part
    if kind == "starter":
        path, dtype, partition, tokens, repeats, folder, *lines = rest
        starter(Path(path), dtype, partition, int(tokens), int(repeats), Path(folder), lines)
    elif kind == "alone":
        path, dtype, tokens, repeats = rest
        tell(alone(Path(path), dtype, int(tokens), int(repeats)))
    else:
        tell({"resident": resident(os.getpid())})


def tell(found: dict[str, Any]) -> None:
    """Print a result, and wait until it was read and others were looked at."""
    print(json.dumps(found), flush=True)
    sys.stdin.read()


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=HIDDEN_DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    if arguments.part:
        run_part(arguments.part)
        return
    with Report(arguments) as report:
        nothing = empty()
        for name in arguments.model:
            with tempfile.TemporaryDirectory() as folder:
                how = make_model(name, arguments.dtype, Path(folder)), arguments.dtype, arguments.tokens
                whole, tokens = measure_alone(*how, arguments.repeats)
                rings = [whole, *(measure_ring(*how, blocks, arguments.repeats, tokens) for blocks in RINGS[name])]
            report.note(table(name, arguments.dtype, rings, nothing) + "\n")
            for ring in rings:
                where = f"{name}, devices: {len(ring.devices)}"
                for rate, alone_rate in zip(ring.rates, whole.rates, strict=True):
                    report.add("tokens/s", rate, "more", where=where)
                    report.add("times one device", rate / alone_rate, "more", where=where)
                resident_mb = max(device.resident for device in ring.devices) / MEGA
                report.add("MB of the largest device", resident_mb, "less", where=where)


if __name__ == "__main__":
    main()
