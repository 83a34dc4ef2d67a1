"""Several concurrent clients of one chain of servers: their total throughput, and how much each client slows down.

    python -m benchmarks.serving.clients [--shape small] [--clients 8] [--servers 3] [--tokens 64]

Servers and clients are processes with one torch thread each. One client alone, all clients at once, and the local
transformers model (one sequence, and a batch with one sequence per client) are measured alternately. Every client
generates its own text; the first client's tokens are compared with the local model's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.worker import Worker, start_workers
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.transport.p2p import quiet_hivemind

PROMPT_TOKENS = 16


def prompts(count: int) -> torch.Tensor:
    """One prompt per client, `[count, PROMPT_TOKENS]`."""
    return torch.randint(0, 1024, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def run_client(path: str, address: str, number: int) -> None:
    """A client's process: generate a text for each command, and report its time and tokens."""
    torch.set_num_threads(1)
    quiet_hivemind()
    model = AutoDistributedModelForCausalLM.from_pretrained(path, initial_peers=[address], wire="none")
    prompt = prompts(number + 1)[number:]
    with closing(model.swarm):
        model.generate(prompt, max_new_tokens=4, do_sample=False)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            text = model.generate(prompt, max_new_tokens=int(line), do_sample=False)
            print(json.dumps([time.perf_counter() - began, text[0, PROMPT_TOKENS:].tolist()]), flush=True)


def run(clients: Sequence[Worker], tokens: int) -> tuple[float, list[float], list[list[int]]]:
    """Let clients generate at the same time: seconds for all, seconds of each, their tokens."""
    began = time.perf_counter()
    for client in clients:
        client.send(tokens)
    seconds, texts = zip(*(client.receive() for client in clients), strict=True)
    return time.perf_counter() - began, list(seconds), list(texts)


def measure(report: Report, shape: str, count: int, servers: int, tokens: int) -> None:
    """Measure one client, all clients and the local model alternately."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(shape, Path(folder))
        local = AutoModelForCausalLM.from_pretrained(path)
        blocks = split_blocks(SHAPES[shape].num_hidden_layers, servers)

        def local_rate(sequences: int) -> float:
            began = time.perf_counter()
            local.generate(prompts(sequences), max_new_tokens=tokens, do_sample=False)
            return sequences * tokens / (time.perf_counter() - began)

        expected = local.generate(prompts(1), max_new_tokens=tokens, do_sample=False)[0, PROMPT_TOKENS:].tolist()
        with (
            LocalSwarm(str(path), blocks, options=("--threads", "1", "--throughput", "1000")) as swarm,
            start_workers("benchmarks.serving.clients", [str(path), swarm.address], count) as clients,
        ):
            for _ in report.rounds(f"{shape}, {servers} servers, {tokens} tokens a text"):
                batch = local_rate(count)
                seconds, each, texts = run(clients, tokens)
                together = count * tokens / seconds
                one, _, (text,) = run(clients[:1], tokens)
                alone, local_alone = tokens / one, local_rate(1)
                if not text == texts[0] == expected:
                    raise SystemExit("the first client's tokens differ from the local model's")
                report.add(f"{count} clients, tokens/s together", together, "more")
                report.add(f"local model, batch of {count}, tokens/s", batch)
                report.add("of the local batch", together / batch, "more", decides=True)
                report.add("one client alone, tokens/s", alone, "more")
                report.add("together, times one alone", together / alone, "more")
                report.add("alone, of the local model", alone / local_alone, "more")
                for number, taken in enumerate(each, 1):
                    where = f"client {number} of {count}"
                    report.add("extra time, of its time alone", taken / one - 1, "less", where=where)


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, address, number = arguments.worker
        return run_client(path, address, int(number))
    quiet_hivemind()
    with Report(arguments) as report:
        measure(report, arguments.shape, arguments.clients, arguments.servers, arguments.tokens)


if __name__ == "__main__":
    main()
