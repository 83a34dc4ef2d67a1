"""Several concurrent clients of one chain of servers: their total throughput, and how much each client slows down.

    python -m benchmarks.serving.clients [--shape small] [--clients 8] [--servers 3] [--tokens 128] [--repeats 3]
        [--json FILE]

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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import machine
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.tables import spread
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


@dataclass
class ClientSpeeds:
    """Tokens per second, by repetition.

    Attributes:
        alone: one client.
        together: the sum of all clients.
        slowdowns: of every client in every repetition: extra time of its text as a fraction of the time alone.
        local, batch: the local model with one sequence, and the sum of one sequence per client in a batch.
    """

    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)


def run(clients: Sequence[Worker], tokens: int) -> tuple[float, list[float], list[list[int]]]:
    """Let clients generate at the same time: seconds for all, seconds of each, their tokens."""
    began = time.perf_counter()
    for client in clients:
        client.send(tokens)
    seconds, texts = zip(*(client.receive() for client in clients), strict=True)
    return time.perf_counter() - began, list(seconds), list(texts)


def measure(shape: str, count: int, servers: int, tokens: int, repeats: int) -> ClientSpeeds:
    """Measure one client, all clients and the local model alternately."""
    torch.set_num_threads(1)
    figures = ClientSpeeds()
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
            for _ in range(repeats):
                alone, _, (text,) = run(clients[:1], tokens)
                if text != expected:
                    raise SystemExit("the tokens differ from the local model's")
                together, seconds, texts = run(clients, tokens)
                if texts[0] != expected:
                    raise SystemExit("with other clients running, a client's tokens differ from the local model's")
                figures.alone.append(tokens / alone)
                figures.together.append(count * tokens / together)
                figures.slowdowns += [one / alone - 1 for one in seconds]
                figures.local.append(local_rate(1))
                figures.batch.append(local_rate(count))
    return figures


def table(figures: ClientSpeeds, count: int) -> str:
    """Format the results in Markdown."""
    ratios = [together / alone for together, alone in zip(figures.together, figures.alone, strict=True)]
    beside = [alone / local for alone, local in zip(figures.alone, figures.local, strict=True)]
    rows = [
        ("one client alone, tokens/s", spread(figures.alone, 1)),
        (f"{count} clients at once, tokens/s together", spread(figures.together, 1)),
        ("all clients together, relative to one alone", spread(ratios)),
        ("extra time of a client's text, relative to alone", spread(figures.slowdowns)),
        ("local model, one sequence, tokens/s", spread(figures.local, 1)),
        (f"local model, {count} sequences in one batch, tokens/s together", spread(figures.batch, 1)),
        ("one client alone, relative to the local model", spread(beside)),
    ]
    return "\n".join(["| | median (range) |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, address, number = arguments.worker
        return run_client(path, address, int(number))
    quiet_hivemind()
    about = machine.describe()
    figures = measure(arguments.shape, arguments.clients, arguments.servers, arguments.tokens, arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(f"shape {arguments.shape}, fp32, {arguments.servers} servers, {arguments.tokens} tokens a text")
    print(table(figures, arguments.clients))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "figures": asdict(figures)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
