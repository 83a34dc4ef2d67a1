"""Speed of fine-tuning over the swarm (forward and backward) relative to the same training of the local model.

    python -m benchmarks.training [--only near|far] [--shape small]

LoRA factors (rank 8, queries and values) are trained in fp32, with batches of 8 sequences of 64 tokens. The local model
is the transformers model with `peft`, in one thread. Both are measured alternately.

`near`: three servers with one thread each, and the local model.
`far`: three and six servers (every span twice), 50 ms one way between any two peers. Each server may use a quarter of a
processor, so that six of them do not compete for two. That needs Linux's control groups and permission to create one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
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


def near(report: Report, shape: str, servers: int) -> None:
    """Measure a chain and the local model alternately."""
    with ExitStack() as stack:
        path = make_model(shape, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        local = local_model(path)
        blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
        options = ("--threads", "1", "--throughput", "1000")
        swarm = stack.enter_context(LocalSwarm(str(path), blocks, options=options))
        model = stack.enter_context(tuned(path, swarm.address))
        for one in (model, local):
            speed(one)  # warms up
        for _ in report.rounds(f"{shape}, {servers} servers"):
            here, beside = speed(model), speed(local)
            report.add("tokens/s", here, "more")
            report.add("local tokens/s", beside)
            report.add("of the local speed", here / beside, "more", decides=True)


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


def far(report: Report, shape: str) -> None:
    """Measure three servers and six alternately. Raises `OSError` if their processors cannot be limited."""
    DelayedPeer.network = Network.read(str(DELAY))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    with ExitStack() as stack:
        path = make_model(shape, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        spans = split_blocks(SHAPES[shape].num_hidden_layers, 3)
        models = [
            stack.enter_context(tuned(path, stack.enter_context(far_swarm(path, blocks))))
            for blocks in (spans, [*spans, *spans])
        ]
        for model in models:
            speed(model)  # warms up
        for _ in report.rounds(f"{shape}, {1e3 * DELAY:.0f} ms one way, {CPU_SHARE} of a processor a server"):
            three, six = map(speed, models)
            report.add("3 servers, tokens/s", three, "more")
            report.add("6 servers, tokens/s", six, "more")
            report.add("six, times three", six / three, "more", decides=True)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--only", choices=("near", "far"))
    parser.add_argument("--shape", choices=SHAPES, help="both if left out; far: small")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    with Report(arguments) as report:
        if arguments.only != "far":
            for shape in [arguments.shape] if arguments.shape else ("tiny", "small"):
                near(report, shape, 3)
        if arguments.only != "near":
            try:
                far(report, arguments.shape or "small")
            except OSError as error:
                report.note(f"far: not measured, as there is no control group for the servers here ({error})")


if __name__ == "__main__":
    main()
