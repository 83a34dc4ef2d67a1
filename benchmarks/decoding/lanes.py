"""Throughput of several lanes relative to one: on a slow network, and on a fast one where only computing matters.

    python -m benchmarks.decoding.lanes [--tokens 40] [--repeats 3] [--json FILE]

A lane is one text here. On the slow network (three servers, 50 ms one way between all peers, simulated by delaying the
streams of real libp2p processes) a lane's token takes four delays, during which the servers are idle unless there are
other lanes. On the fast network, two servers with one thread each share two cores with the client, whose own work
counts as well.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_network
from benchmarks.common.tables import spread
from benchmarks.decoding.chain import seconds_per_token
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

PROMPT_TOKENS = 16

Rates = dict[int, list[float]]
"""Number of lanes -> their total tokens/s, by repetition."""


def measure(model: Any, local: Any, lanes: Sequence[int], tokens: int, repeats: int) -> Rates:
    """Measure the numbers of lanes alternately."""

    def run(count: int, new: int) -> torch.Tensor:
        return model.generate(prompts(count), max_new_tokens=new, do_sample=False, lanes=count)

    found: Rates = {count: [] for count in lanes}
    expected = local.generate(prompts(max(lanes)), max_new_tokens=8, do_sample=False)
    for count in lanes:  # also warms up
        if not torch.equal(run(count, 8), expected[:count]):
            raise SystemExit(f"{count} lanes: the tokens differ from the local model's")
    for _ in range(repeats):
        for count in lanes:
            found[count].append(count / seconds_per_token(partial(run, count), tokens))
    return found


def prompts(count: int) -> torch.Tensor:
    """Token ids `[count, PROMPT_TOKENS]`; the first prompts are the same for any count."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(0, 1024, (PROMPT_TOKENS,), generator=generator) for _ in range(count)])


@contextmanager
def fast_network(path: Path, shape: str, servers: int) -> Iterator[Any]:
    """Yield a client of servers on the same machine."""
    blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
    with LocalSwarm(str(path), blocks, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[swarm.address], wire="none")
        yield model
        model.swarm.close()


def table(found: dict[str, Rates]) -> str:
    """Format the results in Markdown."""
    lines = [
        "tokens/s of all lanes together, one text per lane; median (range)",
        "",
        "| where | lanes | tokens/s | times one lane |",
        "| --- | --- | --- | --- |",
    ]
    for where, rates in found.items():
        for count, values in rates.items():
            ratios = [value / one for value, one in zip(values, rates[1], strict=True)]
            lines.append(f"| {where} | {count} | {spread(values, 1)} | {spread(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--only", choices=["slow", "fast"], help="one of the two parts")
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    about = machine.describe()
    found: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "fast":
            path = make_model("tiny", Path(folder))
            local: Any = AutoModelForCausalLM.from_pretrained(path)
            with slow_network(path, split_blocks(SHAPES["tiny"].num_hidden_layers, 3), arguments.delay) as model:
                where = f"tiny, 3 servers, {1e3 * arguments.delay:.0f} ms one way"
                found[where] = measure(model, local, (1, 3, 6), arguments.tokens, arguments.repeats)
        if arguments.only != "slow":
            path = make_model("small", Path(folder))
            local = AutoModelForCausalLM.from_pretrained(path)
            with fast_network(path, "small", 2) as model:
                found["small, 2 servers, no delay"] = measure(model, local, (1, 2), arguments.tokens, arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "tokens_a_second": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
