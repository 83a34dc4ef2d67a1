"""How much a client is slowed down by others whose tokens leave early, with and without urgency.

    python -m benchmarks.early_exit.urgency [--shape small] [--servers 3] [--others 2] [--tokens 32]
        [--json FILE]

Servers and clients are processes with one torch thread each, without delay between them. One client generates plainly,
and is measured. The others generate all the time: not at all, with exits whose steps say that they are not urgent
behind the first server, with exits whose steps do not say it, and plainly; these take turns. The exits have threshold
0, so that nearly every token leaves and, because the model's weights are random, nearly none stands: the most work that
exits can cause.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.worker import start_workers
from swarm import AutoDistributedModelForCausalLM, EarlyExit
from swarm.cli.local_swarm import LocalSwarm
from swarm.client.early_exit import exit_decoder
from swarm.transport.p2p import quiet_hivemind

WORKER = "benchmarks.early_exit.urgency"
ALONE, YIELDING, URGENT, PLAIN = "no others", "exits, not urgent", "exits, all urgent", "plain"
MODES = (ALONE, YIELDING, URGENT, PLAIN)

PROMPT_TOKENS = 16
PIECE_TOKENS = 16
"""Tokens of each text that the others generate until they are told to stop."""


class AllUrgent(EarlyExit):
    """Exits whose steps do not say that they are not urgent anywhere."""

    def first_exit(self, boundaries: Sequence[int]) -> int | None:
        """See `EarlyExit.first_exit`."""
        return None


def run_client(path: str, address: str, number: int) -> None:
    """A client's process.

    A number of tokens makes it generate and report the seconds. A mode makes it generate until the next line comes;
    then it reports its tokens per second.
    """
    torch.set_num_threads(1)
    quiet_hivemind()
    exit_decoder.MIN_GAIN = 0.0  # it would find that exits do not pay here, and stop
    model: Any = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
    prompt_1T = torch.randint(0, 1024, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(number))
    options = {YIELDING: EarlyExit(threshold=0.0), URGENT: AllUrgent(threshold=0.0)}

    def seconds(tokens: int, early_exit: EarlyExit | None = None) -> float:
        began = time.perf_counter()
        model.generate(prompt_1T, max_new_tokens=tokens, do_sample=False, early_exit=early_exit)
        return time.perf_counter() - began

    with closing(model.swarm):
        seconds(4)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if isinstance(command, int):
                print(json.dumps(seconds(command)), flush=True)
                continue
            spent, stop = [], threading.Event()
            listener = threading.Thread(target=lambda stop=stop: (sys.stdin.readline(), stop.set()))
            listener.start()
            while not stop.is_set():
                spent.append(seconds(PIECE_TOKENS, options.get(command)))
            listener.join()
            print(json.dumps(len(spent) * PIECE_TOKENS / sum(spent)), flush=True)


def measure(report: Report, shape: str, servers: int, count: int, tokens: int) -> None:
    """The plain client's speed beside so many others, by what those do."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder))
        blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)
        options = ("--threads", "1", "--throughput", "1000")
        with (
            LocalSwarm(str(path), blocks, options=options) as swarm,
            start_workers(WORKER, [str(path), swarm.address], 1 + count) as (client, *others),
        ):
            for _ in report.rounds(f"{shape}, {servers} servers, {count} others"):
                rates = {}
                for mode in MODES:
                    busy = others if mode != ALONE else []
                    for other in busy:
                        other.send(mode)
                    client.send(PIECE_TOKENS)  # until all are under way
                    client.receive()
                    client.send(tokens)
                    rates[mode] = tokens / client.receive()
                    for other in busy:
                        other.send("stop")
                    each = [other.receive() for other in busy]
                    if each:
                        report.add("each other, tokens/s", sum(each) / len(each), where=mode)
                for mode, rate in rates.items():
                    report.add("client, times alone", rate / rates[ALONE], "more", decides=True, where=mode)
                    urgent = rate / rates[URGENT]
                    report.add("times beside exits that are all urgent", urgent, "more", where=mode)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--others", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, address, number = arguments.worker
        return run_client(path, address, int(number))
    quiet_hivemind()
    with Report(arguments) as report:
        measure(report, arguments.shape, arguments.servers, arguments.others, arguments.tokens)


if __name__ == "__main__":
    main()
