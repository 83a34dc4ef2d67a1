"""How much a client is slowed down by others whose tokens leave early, with and without urgency.

    python -m benchmarks.early_exit.urgency [--shape small] [--servers 3] [--others 2] [--tokens 32] [--repeats 5]
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

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import spread, table, times
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


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of the plain client and of each of the others, by mode, by repetition."""
    found: dict[str, dict[str, list[float]]] = {mode: {"client": [], "others": []} for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(arguments.shape, Path(folder))
        blocks = split_blocks(SHAPES[arguments.shape].num_hidden_layers, arguments.servers)
        options = ("--threads", "1", "--throughput", "1000")
        with (
            LocalSwarm(str(path), blocks, options=options) as swarm,
            start_workers(WORKER, [str(path), swarm.address], 1 + arguments.others) as (client, *others),
        ):
            for repeat in range(arguments.repeats):
                for mode in MODES:
                    print(f"{repeat + 1} of {arguments.repeats}: {mode}", file=sys.stderr, flush=True)
                    busy = others if mode != ALONE else []
                    for other in busy:
                        other.send(mode)
                    client.send(PIECE_TOKENS)  # until all are under way
                    client.receive()
                    client.send(arguments.tokens)
                    found[mode]["client"].append(arguments.tokens / client.receive())
                    for other in busy:
                        other.send("stop")
                    rates = [other.receive() for other in busy]
                    found[mode]["others"].append(sum(rates) / len(rates) if rates else 0.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--others", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, address, number = arguments.worker
        return run_client(path, address, int(number))
    quiet_hivemind()
    print(", ".join(machine.describe().values()))
    found = measure(arguments)
    rows = [
        [
            mode,
            times(rates["client"], found[ALONE]["client"]),
            times(rates["client"], found[URGENT]["client"]),
            spread(rates["others"], 1) if mode != ALONE else "",
        ]
        for mode, rates in found.items()
    ]
    heading = ["the others", "client, times alone", "times beside exits that are all urgent", "each other, tokens/s"]
    print(f"\nmedian (range) of {arguments.repeats}\n\n{table(heading, rows)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine.describe(), "results": found}, indent=2))


if __name__ == "__main__":
    main()
