"""Decode speed of a chain of 1, 2, 3 and 4 servers against the local transformers model, and what a hop costs.

    python -m benchmarks.chain [--shape tiny] [--tokens 64] [--repeats 5] [--json FILE]

Every server is a process with one torch thread; so is the local model. All models stay loaded and take turns, round
after round, so that whatever else the machine does falls on all of them. `ms a hop` is the slope of the time for a token
over the number of servers, which contains everything but the blocks' own computation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks import machine
from benchmarks.shapes import SHAPES, make_model
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

CHAINS = (1, 2, 3, 4)
PROMPT = 16


def split(blocks: int, servers: int) -> list[str]:
    """`--blocks` of each server, as even as possible."""
    edges = [round(blocks * number / servers) for number in range(servers + 1)]
    return [f"{start}:{end}" for start, end in zip(edges, edges[1:], strict=False)]


def seconds_a_token(generate: Callable[[int], object], tokens: int) -> float:
    """Time of one token, the prompt's own time taken off by a second run with half as many."""
    times = []
    for count in (tokens, tokens // 2):
        began = time.perf_counter()
        generate(count)
        times.append(time.perf_counter() - began)
    return (times[0] - times[1]) / (tokens - tokens // 2)


def measure(shape: str, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a token of every repeat, by contestant: "local", "1", "2", ..."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = make_model(shape, Path(folder))
        contestants = {"local": AutoModelForCausalLM.from_pretrained(path)}
        blocks = SHAPES[shape].num_hidden_layers
        for servers in CHAINS:
            options = ("--threads", "1", "--throughput", "1000")
            swarm = stack.enter_context(LocalSwarm(str(path), split(blocks, servers), options=options))
            model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[swarm.address])
            stack.callback(model.swarm.close)
            contestants[str(servers)] = model
        prompt = torch.randint(0, 1024, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        expected = contestants["local"].generate(prompt, max_new_tokens=tokens, do_sample=False)
        results: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(repeats + 1):
            for name, model in contestants.items():

                def generate(count: int, model: AutoModelForCausalLM = model) -> torch.Tensor:
                    return model.generate(prompt, max_new_tokens=count, do_sample=False)

                if not torch.equal(generate(tokens), expected):
                    raise SystemExit(f"{name}: the tokens differ from the local model's")
                seconds = seconds_a_token(generate, tokens)
                if repeat:  # the first round warms up
                    results[name].append(seconds)
        return results


def slope(results: dict[str, list[float]]) -> list[float]:
    """Milliseconds a hop, by repeat: least squares of time over servers."""
    repeats = zip(*(results[str(servers)] for servers in CHAINS), strict=True)
    return [1e3 * statistics.linear_regression(CHAINS, times).slope for times in repeats]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(shape: str, results: dict[str, list[float]]) -> str:
    """The figures for people, in Markdown."""
    lines = [
        f"shape {shape}: hidden {SHAPES[shape].hidden_size}, {SHAPES[shape].num_hidden_layers} blocks, fp32, "
        "greedy, batch 1; median (range)",
        "",
        "| servers | ms a token | tokens/s | of the local speed |",
        "| --- | --- | --- | --- |",
    ]
    for name, times in results.items():
        ratios = [local / own for local, own in zip(results["local"], times, strict=True)]
        speeds = [1 / seconds for seconds in times]
        milliseconds = [1e3 * seconds for seconds in times]
        lines.append(f"| {name} | {spread(milliseconds)} | {spread(speeds, 0)} | {spread(ratios)} |")
    return "\n".join([*lines, "", f"ms a hop beyond compute (slope, 1 to 4 servers): {spread(slope(results))}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the raw figures here too")
    arguments = parser.parse_args()
    quiet_hivemind()
    about = machine.describe()
    results = measure(arguments.shape, arguments.tokens, arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(arguments.shape, results))
    if arguments.json:
        figures = {"machine": about, "shape": arguments.shape, "seconds_a_token": results, "ms_a_hop": slope(results)}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
