"""Decode speed of chains of 1, 2, 3 and 4 servers relative to the local transformers model, and the cost of a hop.

    python -m benchmarks.decoding.chain [--shape tiny] [--servers 1 2 3 4] [--tokens 64]

Every server is a process with one torch thread; so is the local model. All chains run at once, and take turns with the
local model, text by text, so that other load on the machine affects both sides. `ms a further server` is the slope,
over the number of servers, of a token's time; it includes what a processor loses by sleeping between a server's steps.
`ms a hop` is measured directly: the time of a step, minus the compute time that the servers report, divided by the
number of servers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

PROMPT = torch.randint(0, 1024, (1, 16), generator=torch.Generator().manual_seed(1))


class Stamps(StoppingCriteria):
    """Notes when each token is there, and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(model: Any, tokens: int) -> tuple[torch.Tensor, float]:
    """A text, and the seconds of a token, without the first one."""
    stamps = Stamps()
    noted = StoppingCriteriaList([stamps])
    text = model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, stopping_criteria=noted)
    return text, (stamps.times[-1] - stamps.times[0]) / (tokens - 1)


def generate_by_chain(model: Any, tokens: int) -> tuple[torch.Tensor, float, float]:
    """The same, and the median time of a step beyond the servers' compute time, per hop, in seconds.

    The hops of a step are measured together because an intermediate server's reply reaches the client a little later
    than the next server.
    """
    costs: list[float] = []
    run = model.swarm.run

    def timed(work: Any) -> Any:
        began = time.perf_counter()
        result = run(work)
        seconds = time.perf_counter() - began
        if timings := session.timings:
            costs.append((seconds - sum(timing.compute for timing in timings)) / len(timings))
        return result

    with model.inference_session(max_length=PROMPT.shape[1] + tokens) as session:
        model.swarm.run = timed
        try:
            text, seconds = generate(model, tokens)
        finally:
            model.swarm.run = run
    return text, seconds, statistics.median(costs)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 3, 4], help="lengths of the chains")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    with ExitStack() as ends, Report(arguments) as report:
        path = make_model(arguments.shape, Path(ends.enter_context(tempfile.TemporaryDirectory())))
        local: Any = AutoModelForCausalLM.from_pretrained(path)
        expected, _ = generate(local, arguments.tokens)
        chains: dict[int, Any] = {}
        for servers in arguments.servers:
            blocks = split_blocks(SHAPES[arguments.shape].num_hidden_layers, servers)
            options = ("--threads", "1", "--throughput", "1000")
            address = ends.enter_context(LocalSwarm(str(path), blocks, options=options)).address
            model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
            ends.callback(model.swarm.close)
            if not generate(model, arguments.tokens)[0].equal(expected):  # also warms up
                raise SystemExit(f"{servers} servers: the tokens differ from the local model's")
            chains[servers] = model
        config = SHAPES[arguments.shape]
        report.note(f"{arguments.shape}: hidden {config.hidden_size}, {config.num_hidden_layers} blocks, fp32, greedy")
        for _ in report.rounds(arguments.shape):
            beyond = []
            for servers, model in chains.items():
                _, seconds, hop = generate_by_chain(model, arguments.tokens)
                _, beside = generate(local, arguments.tokens)
                beyond.append(seconds - beside)
                where = f"{arguments.shape}, servers: {servers}"
                report.add("tokens/s", 1 / seconds, "more", where=where)
                report.add("local tokens/s", 1 / beside, where=where)
                report.add("of the local speed", beside / seconds, "more", decides=True, where=where)
                report.add("ms a hop", 1e3 * hop, "less", where=where)
            if len(chains) > 1:
                slope = statistics.linear_regression(list(chains), beyond).slope
                report.add("ms a further server", 1e3 * slope, "less")


if __name__ == "__main__":
    main()
