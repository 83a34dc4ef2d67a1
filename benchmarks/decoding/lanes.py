"""Throughput of several lanes relative to one: on a slow network, and on a fast one where only computing matters.

    python -m benchmarks.decoding.lanes [--tokens 40]

A lane is one text here. On the slow network (three servers, 50 ms one way between all peers, simulated by delaying the
streams of real libp2p processes) a lane's token takes four delays, during which the servers are idle unless there are
other lanes. On the fast network, two servers with one thread each share two cores with the client, whose own work
counts as well.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_network
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

PROMPT_TOKENS = 16


def seconds_per_token(generate: Callable[[int], object], tokens: int) -> float:
    """Measure the time of one token. A second run with half as many tokens eliminates the prompt's own time."""
    times = []
    for count in (tokens, tokens // 2):
        began = time.perf_counter()
        generate(count)
        times.append(time.perf_counter() - began)
    return (times[0] - times[1]) / (tokens - tokens // 2)


def measure(report: Report, where: str, model: Any, local: Any, lanes: Sequence[int], tokens: int) -> None:
    """Measure the numbers of lanes alternately."""

    def run(count: int, new: int) -> torch.Tensor:
        return model.generate(prompts(count), max_new_tokens=new, do_sample=False, lanes=count)

    expected = local.generate(prompts(max(lanes)), max_new_tokens=8, do_sample=False)
    for count in lanes:  # also warms up
        if not torch.equal(run(count, 8), expected[:count]):
            raise SystemExit(f"{count} lanes: the tokens differ from the local model's")
    for _ in report.rounds(where):
        rates = {count: count / seconds_per_token(partial(run, count), tokens) for count in lanes}
        for count, rate in rates.items():
            report.add("tokens/s of all lanes", rate, "more", where=f"{where}, lanes: {count}")
            report.add("times one lane", rate / rates[1], "more", decides=True, where=f"{where}, lanes: {count}")


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


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--only", choices=["slow", "fast"], help="one of the two parts")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Report(arguments) as report:
        if arguments.only != "fast":
            path = make_model("tiny", Path(folder))
            local: Any = AutoModelForCausalLM.from_pretrained(path)
            with slow_network(path, split_blocks(SHAPES["tiny"].num_hidden_layers, 3), arguments.delay) as model:
                where = f"tiny, 3 servers, {1e3 * arguments.delay:.0f} ms one way"
                measure(report, where, model, local, (1, 3, 6), arguments.tokens)
        if arguments.only != "slow":
            path = make_model("small", Path(folder))
            local = AutoModelForCausalLM.from_pretrained(path)
            with fast_network(path, "small", 2) as model:
                measure(report, "small, 2 servers, no delay", model, local, (1, 2), arguments.tokens)


if __name__ == "__main__":
    main()
