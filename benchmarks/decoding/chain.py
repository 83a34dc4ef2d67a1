"""Decode speed of chains of 1, 2, 3 and 4 servers relative to the local transformers model, and the cost of a hop.

    python -m benchmarks.decoding.chain [--shape tiny] [--tokens 64] [--repeats 5] [--json FILE]

Every server is a process with one torch thread; so is the local model. For each chain length, the local model and the
chain are measured alternately, so that other load on the machine affects both. `ms a hop` is the slope, over the number
of servers, of a token's time beyond the local model's; it includes what a processor loses by sleeping between a
server's steps. `hop` is measured directly: the time of a step, minus the compute time that the servers report, divided
by the number of servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import spread
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

CHAINS = (1, 2, 3, 4)
PROMPT_TOKENS = 16


def seconds_per_token(generate: Callable[[int], object], tokens: int) -> float:
    """Measure the time of one token. A second run with half as many tokens eliminates the prompt's own time."""
    times = []
    for count in (tokens, tokens // 2):
        began = time.perf_counter()
        generate(count)
        times.append(time.perf_counter() - began)
    return (times[0] - times[1]) / (tokens - tokens // 2)


@dataclass
class Series:
    """Measurements of one chain length, by repetition.

    Attributes:
        chain, local: seconds per token of the chain, and of the local model measured next to it.
        hop: see `hop_cost`.
    """

    chain: list[float]
    local: list[float]
    hop: list[float]

    def ratios(self) -> list[float]:
        """Speed of the chain relative to the local model."""
        return [local / chain for local, chain in zip(self.local, self.chain, strict=True)]


def measure(shape: str, tokens: int, repeats: int) -> dict[int, Series]:
    """Measure every chain length."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder))
        local = AutoModelForCausalLM.from_pretrained(path)
        return {servers: measure_chain(shape, path, local, servers, tokens, repeats) for servers in CHAINS}


def measure_chain(shape: str, path: Path, local: PreTrainedModel, servers: int, tokens: int, repeats: int) -> Series:
    """Measure a chain and the local model alternately."""
    prompt = torch.randint(0, 1024, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
    series = Series([], [], [])
    with LocalSwarm(str(path), blocks, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[swarm.address], wire="none")

        def run(which: PreTrainedModel, count: int) -> torch.Tensor:
            return which.generate(prompt, max_new_tokens=count, do_sample=False)

        if not torch.equal(run(model, tokens), run(local, tokens)):  # also warms up
            raise SystemExit(f"{servers} servers: the tokens differ from the local model's")
        for _ in range(repeats):
            series.chain.append(seconds_per_token(partial(run, model), tokens))
            series.hop.append(hop_cost(model, prompt, tokens))
            series.local.append(seconds_per_token(partial(run, local), tokens))
        model.swarm.close()
    return series


def hop_cost(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> float:
    """Time of a step beyond the servers' compute time, per hop, in seconds; median over the steps.

    The hops of a step are measured together because an intermediate server's reply reaches the client a little later
    than the next server.
    """
    costs: list[float] = []
    run = model.swarm.run

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        result = run(*arguments)
        seconds = time.perf_counter() - began
        if timings := session.timings:
            costs.append((seconds - sum(timing.compute for timing in timings)) / len(timings))
        return result

    with model.inference_session(max_length=prompt.shape[1] + tokens) as session:
        model.swarm.run = timed
        try:
            model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        finally:
            model.swarm.run = run
    return statistics.median(costs)


def slope(results: dict[int, Series]) -> list[float]:
    """Milliseconds per hop, by repetition: least squares of the time beyond the local model's over servers."""
    beyond = [[c - statistics.median(s.local) for c in s.chain] for s in results.values()]
    return [1e3 * statistics.linear_regression(CHAINS, times).slope for times in zip(*beyond, strict=True)]


def table(shape: str, results: dict[int, Series]) -> str:
    """Format the results in Markdown."""
    config = SHAPES[shape]
    lines = [
        f"shape {shape}: hidden {config.hidden_size}, {config.num_hidden_layers} blocks, fp32, greedy, batch 1; "
        "median (range)",
        "",
        "| servers | ms per token | tokens/s | local tokens/s | of the local speed | ms per hop beyond compute |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for servers, series in results.items():
        columns = (
            spread([1e3 * seconds for seconds in series.chain]),
            spread([1 / seconds for seconds in series.chain], 0),
            spread([1 / seconds for seconds in series.local], 0),
            spread(series.ratios()),
            spread([1e3 * seconds for seconds in series.hop]),
        )
        lines.append(f"| {servers} | {' | '.join(columns)} |")
    return "\n".join([*lines, "", f"slope of ms per token over servers, 1 to 4: {spread(slope(results))}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    about = machine.describe()
    results = measure(arguments.shape, arguments.tokens, arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(arguments.shape, results))
    if arguments.json:
        series = {servers: asdict(series) for servers, series in results.items()}
        figures = {"machine": about, "shape": arguments.shape, "seconds_a_token": series, "slope_ms": slope(results)}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
