"""Memory of each device of a ring, and its tokens/s with one lane per device, relative to the model on one device.

    python -m benchmarks.decoding.memory [--model nano tinyllama] [--dtype bfloat16] [--tokens 32] [--repeats 3]
        [--json FILE]

The partitions are those of MDI-LLM's tables I and II: the starter is a client that runs the first blocks itself; the
secondaries are servers. Every device is a process with one torch thread (and a libp2p daemon, which is counted). The
weights are random.

The peak includes pages of the checkpoint's files that are read one block at a time (a client compares the digests of
all blocks).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import machine
from benchmarks.common.tables import spread
from benchmarks.decoding.chain import seconds_per_token
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
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

TEXTS, PROMPT = 3, 1
"""As in the paper: three texts with a prompt of one token each."""

MEGA = 1e6


@dataclass
class Device:
    """Memory in bytes: peak resident, resident during generation, and what the model itself takes."""

    peak: int
    steady: int
    model: int


@dataclass
class Ring:
    """One partition.

    Attributes:
        blocks: of each device; one entry for the whole model on one device.
        rates: tokens/s of all texts together, by repeat.
    """

    blocks: tuple[int, ...]
    devices: list[Device] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


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


def write(model: Any, tokens: int, **settings: Any) -> torch.Tensor:
    """Generate three texts greedily."""
    prompt = torch.arange(5, 5 + TEXTS).view(TEXTS, PROMPT)
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **settings)


def measured(run: Any, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens/s by repetition, and this process's memory."""
    run(4)  # warms up
    rates = [TEXTS / seconds_per_token(run, tokens) for _ in range(repeats)]
    return {"rates": rates, "peak": peak(os.getpid()), "steady": steady(os.getpid())}


def alone(path: Path, dtype: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Run the whole model in this process, one text after the other."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=HIDDEN_DTYPES[dtype])

    def run(count: int) -> None:
        for first in range(TEXTS):
            prompt = torch.tensor([[5 + first]])
            model.generate(prompt, max_new_tokens=count, do_sample=False)

    return measured(run, tokens, repeats)


def starter(path: Path, dtype: str, blocks: int, address: str, tokens: int, repeats: int, lanes: int) -> dict[str, Any]:
    """Run the first blocks in this process and the rest in the swarm at `address`."""
    model: Any = AutoDistributedModelForCausalLM.from_pretrained(
        path, initial_peers=[address], dtype=dtype, local_blocks=blocks, wire="none"
    )
    try:
        return measured(partial(write, model, lanes=lanes), tokens, repeats)
    finally:
        model.swarm.close()


def peak(pid: int) -> int:
    """Peak resident memory of a process and its libp2p daemon."""
    return sum(_status(one, "VmHWM") for one in _family(pid))


def steady(pid: int) -> int:
    """Current resident memory."""
    return sum(_status(one, "VmRSS") for one in _family(pid))


def _family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children() if "p2pd" in child.name())]


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def in_a_process(*arguments: object) -> dict[str, Any]:
    """Run a part of this benchmark as a separate process, so that its memory can be measured alone."""
    command = [sys.executable, "-m", "benchmarks.decoding.memory", "--part", *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def bytes_of(path: Path, dtype: str, tokens: int) -> tuple[list[int], int]:
    """Of each block with the cache of all texts, and of embeddings, norm and head."""
    checkpoint = open_checkpoint(path)
    prints = memory_footprint(checkpoint, HIDDEN_DTYPES[dtype])
    blocks = [prints.span_bytes(block, block + 1, TEXTS * (PROMPT + tokens)) for block in range(checkpoint.blocks)]
    heads = sum(tensor.numel() for _, tensor in checkpoint.read_tensors(checkpoint.is_client_tensor))
    return blocks, heads * HIDDEN_DTYPES[dtype].itemsize


def measure_ring(path: Path, dtype: str, blocks: tuple[int, ...], tokens: int, repeats: int) -> Ring:
    """Start the secondaries, and run the starter."""
    ring = Ring(blocks)
    of_block, heads = bytes_of(path, dtype, tokens)
    edges = [sum(blocks[:device]) for device in range(len(blocks) + 1)]
    sizes = [sum(of_block[start:end]) for start, end in itertools.pairwise(edges)]
    spans = [f"{start}:{end}" for start, end in itertools.pairwise(edges[1:])]
    options = ("--threads", "1", "--throughput", "100", "--dtype", dtype)
    with LocalSwarm(str(path), spans, options=options) as swarm:
        found = in_a_process("starter", path, dtype, blocks[0], swarm.address, tokens, repeats, len(blocks))
        ring.rates = found["rates"]
        ring.devices.append(Device(found["peak"], found["steady"], sizes[0] + heads))
        for server, size in zip(swarm.servers, sizes[1:], strict=True):
            ring.devices.append(Device(peak(server.pid), steady(server.pid), size))
    return ring


def measure_alone(path: Path, dtype: str, tokens: int, repeats: int) -> Ring:
    """Measure the whole model on one device."""
    found = in_a_process("alone", path, dtype, tokens, repeats)
    of_block, heads = bytes_of(path, dtype, tokens)
    size = sum(of_block) + heads
    return Ring((len(of_block),), [Device(found["peak"], found["steady"], size)], found["rates"])


def empty() -> Device:
    """Memory of Python and the libraries alone."""
    found = in_a_process("empty")
    return Device(found["peak"], found["steady"], 0)


def table(name: str, dtype: str, rings: list[Ring], nothing: Device) -> str:
    """Format the results in Markdown."""
    lines = [
        f"{name}, {dtype}, {TEXTS} texts; MB a device, the starter's first; Python and the libraries alone take "
        f"{nothing.peak / MEGA:.0f}",
        "",
        "| devices | blocks | weights and cache | resident | peak | resident over one device's | paper, GB | tokens/s "
        "| times one device |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    whole = rings[0]
    for ring in rings:
        share = max(device.steady for device in ring.devices) / whole.devices[0].steady
        paper = PAPER.get((name, len(ring.devices)))
        ratios = [rate / statistics.median(whole.rates) for rate in ring.rates]
        columns = (
            str(len(ring.devices)),
            " + ".join(map(str, ring.blocks)),
            *(
                " + ".join(f"{getattr(d, what) / MEGA:.0f}" for d in ring.devices)
                for what in ("model", "steady", "peak")
            ),
            f"{share:.2f}",
            " + ".join(map(str, paper)) if paper else "does not fit",
            spread(ring.rates, 1),
            spread(ratios),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def run_part(part: list[str]) -> None:
    """The main function of a process of this benchmark; the last line of its output is the result."""
    kind, *rest = part
    if kind == "starter":
        path, dtype, blocks, address, tokens, repeats, lanes = rest
        found = starter(Path(path), dtype, int(blocks), address, int(tokens), int(repeats), int(lanes))
    elif kind == "alone":
        path, dtype, tokens, repeats = rest
        found = alone(Path(path), dtype, int(tokens), int(repeats))
    else:
        found = {"peak": peak(os.getpid()), "steady": steady(os.getpid())}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=HIDDEN_DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the raw figures here too")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    if arguments.part:
        run_part(arguments.part)
        return
    about, nothing = machine.describe(), empty()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    found: dict[str, list[Ring]] = {}
    for name in arguments.model:
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(name, arguments.dtype, Path(folder))
            how = (path, arguments.dtype)
            found[name] = [measure_alone(*how, arguments.tokens, arguments.repeats)]
            for blocks in RINGS[name]:
                found[name].append(measure_ring(*how, blocks, arguments.tokens, arguments.repeats))
        print("\n" + table(name, arguments.dtype, found[name], nothing), flush=True)
    if arguments.json:
        raw = {name: [asdict(ring) for ring in rings] for name, rings in found.items()}
        arguments.json.write_text(json.dumps({"machine": about, "rings": raw}, indent=2) + "\n")


if __name__ == "__main__":
    main()
