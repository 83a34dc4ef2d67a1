"""Several clients of the same servers, with guesses and without: the sum of their tokens per second.

    python -m benchmarks.wide_area.clients [--shape tiny] [--clients 8] [--servers 3] [--delay 0] [--right 0,0.5,0.8]
        [--tokens 96] [--repeats 5]

Servers and clients are processes with one torch thread each, on two cores. All clients write at the same time, each a
text of its own, with planted drafts that are right with a probability; texts with and without drafts take turns. The
texts are compared with those without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_servers
from benchmarks.common.worker import Worker, start_workers
from benchmarks.serving.clients import PROMPT_TOKENS, prompts
from benchmarks.wide_area.planted import PlantedDraft
from swarm import AutoDistributedModelForCausalLM
from swarm.client import connection
from swarm.transport.p2p import quiet_hivemind


def run_client(path: str, address: str, delay: float, number: int) -> None:
    """A client's process: write a text for each command, and report its time and how it was."""
    torch.set_num_threads(1)
    quiet_hivemind()
    DelayedPeer.network = Network.read(str(delay))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
    prompt_1T = prompts(number + 1)[number:]
    expected: list[int] = []
    with closing(model.swarm):
        print(json.dumps("ready"), flush=True)
        for seed, line in enumerate(sys.stdin):
            right, tokens = json.loads(line)
            truth = [*expected, *[0] * 64].__getitem__
            drafts = () if right is None else [partial(PlantedDraft, right, seed, truth, model.config.vocab_size)]
            began = time.perf_counter()
            text = model.generate(prompt_1T, draft=drafts, max_new_tokens=tokens, do_sample=False)[0].tolist()
            seconds, expected = time.perf_counter() - began, expected or text
            print(json.dumps([seconds, text == expected]), flush=True)


def rate(clients: Sequence[Worker], right: float | None, tokens: int) -> float:
    """Tokens per second of all clients together, while all write."""
    began = time.perf_counter()
    for client in clients:
        client.send([right, tokens])
    found = [client.receive() for client in clients]
    if not all(is_right for _, is_right in found):
        raise SystemExit(f"with drafts that are right with probability {right}, a text differs")
    return len(clients) * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds one way between any two machines")
    parser.add_argument("--right", type=lambda text: [float(one) for one in text.split(",")], default="0,0.5,0.8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, address, delay, number = arguments.worker
        return run_client(path, address, float(delay), int(number))
    quiet_hivemind()
    spans = split_blocks(SHAPES[arguments.shape].num_hidden_layers, arguments.servers)
    ways: list[float | None] = [None, *arguments.right]
    with tempfile.TemporaryDirectory() as folder, Report(arguments) as report:
        path = make_model(arguments.shape, Path(folder))
        report.note(
            f"{arguments.clients} clients, {arguments.servers} servers, {1000 * arguments.delay:g} ms, "
            f"shape {arguments.shape}, {PROMPT_TOKENS} + {arguments.tokens} tokens"
        )
        with slow_servers(path, spans, arguments.delay, throughput="auto") as address:
            options = [str(path), address, str(arguments.delay)]
            with start_workers("benchmarks.wide_area.clients", options, arguments.clients) as clients:
                rate(clients, None, arguments.tokens)  # warms up, and finds out what each text is
                for _ in report.rounds():
                    rates = {right: rate(clients, right, arguments.tokens) for right in ways}
                    for right, found in rates.items():
                        where = "no draft" if right is None else f"draft is right: {right:g}"
                        report.add("tokens/s together", found, "more", where=where)
                        report.add("times plain", found / rates[None], "more", decides=True, where=where)


if __name__ == "__main__":
    main()
