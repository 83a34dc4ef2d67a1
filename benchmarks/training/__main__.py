"""Speed of fine-tuning over the swarm (forward and backward) relative to the same training of the local model.

    python -m benchmarks.training [--only near|far] [--shape small] [--repeats 5] [--json FILE]

LoRA factors (rank 8, queries and values) are trained in fp32, with batches of 8 sequences of 64 tokens. The local model
is the transformers model with `peft`, in one thread. Both are measured alternately.

`near`: three servers with one thread each, and the local model.
`far`: three and six servers (every span twice), 50 ms one way between any two peers. Each server may use a quarter of a
processor, so that six of them do not compete for two. That needs Linux's control groups and permission to create one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.common import machine
from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import spread
from swarm import AutoDistributedModelForCausalLM, TuningOptions
from swarm.cli.local_swarm import LocalSwarm
from swarm.client import connection
from swarm.transport.p2p import quiet_hivemind

SEQUENCES, LENGTH = 8, 64
TOKENS = SEQUENCES * LENGTH
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
DELAY = 0.05
CPU_SHARE = 0.25
"""Fraction of a processor that each server of the far swarm may use."""

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
"""Period of the CPU quota."""


@dataclass
class TrainingSpeeds:
    """Tokens/s of forward and backward together, by repetition."""

    swarm: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [swarm / local for swarm, local in zip(self.swarm, self.local, strict=True)]


def batch() -> torch.Tensor:
    return torch.randint(0, 1024, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))


def speed(model: Any) -> float:
    """Tokens/s of one forward and backward."""
    tokens = batch()
    began = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return TOKENS / seconds


def local_model(path: Path) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(**LORA))


@contextmanager
def tuned(path: Path, address: str) -> Iterator[Any]:
    """The swarm's model with the same factors to train."""
    model = AutoDistributedModelForCausalLM.from_pretrained(
        path, initial_peers=[address], wire="none", tuning_mode="lora", tuning=TuningOptions(lora_config=LORA)
    )
    try:
        yield model
    finally:
        model.swarm.close()


def near(shape: str, servers: int, repeats: int) -> TrainingSpeeds:
    """Measure a chain and the local model alternately."""
    figures = TrainingSpeeds()
    with ExitStack() as stack:
        path = make_model(shape, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        local = local_model(path)
        blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
        options = ("--threads", "1", "--throughput", "1000")
        swarm = stack.enter_context(LocalSwarm(str(path), blocks, options=options))
        model = stack.enter_context(tuned(path, swarm.address))
        for one in (model, local):
            speed(one)  # warms up
        for _ in range(repeats):
            figures.swarm.append(speed(model))
            figures.local.append(speed(local))
    return figures


@contextmanager
def limited(pids: Sequence[int]) -> Iterator[None]:
    """Limit every process to `CPU_SHARE` of a processor. Raises `OSError` if that is not permitted."""
    groups = []
    try:
        for pid in pids:
            group = GROUPS / f"swarm-{os.getpid()}-{pid}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(CPU_SHARE * PERIOD_US)))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in groups:
            for pid in (group / "cgroup.procs").read_text().split():
                (GROUPS / "cgroup.procs").write_text(pid)
            group.rmdir()


@contextmanager
def far_swarm(path: Path, blocks: Sequence[str]) -> Iterator[str]:
    """Run servers on a slow network, each with a fraction of a processor; yields the address to join."""
    with LocalSwarm(str(path), ()) as swarm, ExitStack() as stack:
        where = ("--initial-peers", swarm.address, "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
        pids = []
        for span in blocks:
            arguments = ("-m", "benchmarks.common.delayed", str(DELAY), str(path), "--blocks", span, *where)
            process = subprocess.Popen(
                [sys.executable, *arguments, "--threads", "1", "--throughput", "1000"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids.append(process.pid)
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("Join:"):
                if not line:
                    raise SystemExit("a server ended before it was ready")
        stack.enter_context(limited(pids))
        yield swarm.address


def far(shape: str, repeats: int) -> dict[int, list[float]]:
    """Format tokens/s by number of servers."""
    DelayedPeer.network = Network.read(str(DELAY))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    results: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder))
        spans = split_blocks(SHAPES[shape].num_hidden_layers, 3)
        for blocks in (spans, [*spans, *spans]):
            with far_swarm(path, blocks) as address, tuned(path, address) as model:
                speed(model)
                results[len(blocks)] = [speed(model) for _ in range(repeats)]
    return results


def near_table(shape: str, figures: TrainingSpeeds) -> str:
    return (
        f"| {shape}, 3 servers | {spread(figures.swarm, 0)} | {spread(figures.local, 0)} | {spread(figures.ratios())} |"
    )


def far_table(results: dict[int, list[float]]) -> str:
    three = statistics.median(results[3])
    rows = [
        f"| {servers} | {spread(speeds, 0)} | {spread([speed / three for speed in speeds])} |"
        for servers, speeds in results.items()
    ]
    head = ["| servers | tokens/s | times three |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("near", "far"))
    parser.add_argument("--shape", choices=SHAPES, help="both if left out; far: small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the raw figures here too")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    about = machine.describe()
    raw: dict[str, Any] = {"machine": about}
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    parts: dict[str, Callable[[], None]] = {}

    def run_near() -> None:
        print("| | tokens/s | local tokens/s | of the local speed |\n| --- | --- | --- | --- |")
        for shape in [arguments.shape] if arguments.shape else ("tiny", "small"):
            figures = near(shape, 3, arguments.repeats)
            raw[shape] = asdict(figures)
            print(near_table(shape, figures), flush=True)
        print()

    def run_far() -> None:
        try:
            raw["far"] = far(arguments.shape or "small", arguments.repeats)
        except OSError as error:
            print(f"not measured: no control group for the servers here ({error})")
            return
        print(f"{1e3 * DELAY:.0f} ms one way, {CPU_SHARE} of a processor a server; tokens/s, median (range)\n")
        print(far_table(raw["far"]))

    parts = {"near": run_near, "far": run_far}
    for name, run in parts.items():
        if arguments.only in (None, name):
            run()
    if arguments.json:
        arguments.json.write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main()
