"""Overhead of a gateway: 50 concurrent streams compared with the same load of the Python client, and the first token.

    python -m benchmarks.serving.gateway [--streams 50] [--seconds 60] [--tokens 64] [--turns 3] [--first 30]
        [--json FILE]
    python -m benchmarks.serving.gateway --kill [--streams 50] [--seconds 60] [--tokens 64]

The demo model runs on three servers. Gateway and Python client are processes with one torch thread each; the Python
client is one model whose `generate` runs in as many threads as there are streams. Both are measured alternately. Every
stream counts the tokens in its `usage`; a reply that fails or ends early fails the run. Memory is the gateway's
resident memory.

The first token is measured with one request of 1 token at a time, alternately for gateway and Python client. The
difference is what the gateway adds: HTTP, parsing, tokenization, a thread, an event.

With --kill there are two servers for each span. One is killed after a third of the time, and one of another span after
two thirds. Every stream must finish nevertheless.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import machine
from benchmarks.common.tables import spread
from benchmarks.common.worker import Worker
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm, PeerProcess
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.transport.p2p import quiet_hivemind

MODEL = "swarm-demo"
PROMPT = "Once upon a time there was a king who had"
SPANS = ("0:4", "4:8", "8:12")
MB = 1 / 2**20


@dataclass
class GatewayResults:
    """Measurements, by repetition.

    Attributes:
        gateway, client: tokens per second of all streams together.
        memory: resident memory of the gateway after each repetition, in MB.
        failed: descriptions of failed requests.
        first_gateway, first_client: seconds to the first token.
    """

    gateway: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    requests: int = 0
    first_gateway: list[float] = field(default_factory=list)
    first_client: list[float] = field(default_factory=list)


def body(tokens: int, stream: bool = True) -> dict[str, Any]:
    """The body of a request."""
    messages = [{"role": "user", "content": PROMPT}]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 1, "stream": stream, **options}


async def load(url: str, streams: int, seconds: float, tokens: int, figures: GatewayResults) -> float:
    """Run `streams` streams for `seconds`, each one request after the other; returns tokens per second."""
    done = 0
    began = time.perf_counter()

    async def one() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            reply = await read(url, tokens)
            figures.requests += 1
            used = reply.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
            if not reply.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in reply or not used.isdigit():
                figures.failed.append(repr(reply[-300:]))
            else:
                done += int(used)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one())
    return done / (time.perf_counter() - began)


async def read(url: str, tokens: int) -> bytes:
    """Read one streamed reply, head and body, as raw bytes.

    It is not parsed: in real use that happens on other machines, and httpx would take a tenth of this machine's CPU.
    """
    where = httpx.URL(url)
    content = json.dumps(body(tokens)).encode()
    lengths = f"Content-Length: {len(content)}\r\nConnection: close"
    head = f"POST {where.path} HTTP/1.1\r\nHost: {where.host}\r\n{lengths}\r\n\r\n"
    reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        writer.write(head.encode() + content)
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()


def run_python_client(address: str) -> None:
    """The Python client's process. The command `[streams, seconds, tokens]` runs a load, `[]` generates one token."""
    torch.set_num_threads(1)
    quiet_hivemind()
    model = AutoDistributedModelForCausalLM.from_pretrained(initial_peers=[address])
    tokenizer = load_tokenizer(DEMO_FOLDER)
    with closing(model.swarm):

        def write(tokens: int, do_sample: bool) -> int:
            inputs = tokenizer(PROMPT, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=tokens, do_sample=do_sample)
            return int(output.shape[1] - inputs["input_ids"].shape[1])

        write(4, True)
        print(json.dumps(0), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            began = time.perf_counter()
            if not command:
                write(1, True)
                print(json.dumps(time.perf_counter() - began), flush=True)
                continue
            print(json.dumps(_in_threads(write, *command)), flush=True)


def _in_threads(write: Callable[[int, bool], int], streams: int, seconds: float, tokens: int) -> float:
    done: list[int] = []
    began = time.perf_counter()

    def one() -> None:
        torch.set_num_threads(1)  # threads do not inherit it
        while time.perf_counter() - began < seconds:
            done.append(write(tokens, True))

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def run_command(worker: Worker, *command: float) -> float:
    """Send a command to the Python client's process; returns its result."""
    worker.send(command)
    return float(worker.receive())


def start(stack: ExitStack, spans: Sequence[str]) -> tuple[LocalSwarm, PeerProcess, str]:
    """Start a swarm of the demo model and its gateway, until `stack` closes; returns both and the URL for chats."""
    swarm = stack.enter_context(LocalSwarm(None, spans, options=("--threads", "1", "--cache-tokens", "65536")))
    where = ("--initial-peers", swarm.address, "--port", "0")
    gateway = PeerProcess(("swarm.gateway", *where), {"OMP_NUM_THREADS": "1"})
    stack.callback(gateway.stop)
    return swarm, gateway, gateway.wait_for(r"^Gateway: (\S+)/$")[1] + "/v1/chat/completions"


def measure(streams: int, seconds: float, tokens: int, turns: int, first: int) -> GatewayResults:
    """Measure gateway and Python client alternately."""
    figures = GatewayResults()
    with ExitStack() as stack:
        swarm, gateway, url = start(stack, SPANS)
        worker = stack.enter_context(closing(Worker(["-m", "benchmarks.serving.gateway", "--worker", swarm.address])))
        with httpx.Client(timeout=60) as client:
            for _ in range(first + 3):
                began = time.perf_counter()
                reply = client.post(url, json=body(1, stream=False))
                if reply.is_error:
                    raise SystemExit(reply.text)
                figures.first_gateway.append(time.perf_counter() - began)
                figures.first_client.append(run_command(worker))
        del figures.first_gateway[:3], figures.first_client[:3]
        resident = psutil.Process(gateway.pid).memory_info
        asyncio.run(load(url, streams, min(5.0, seconds), tokens, figures))  # what is made once is made here
        figures.memory.append(resident().rss * MB)
        for _ in range(turns):
            figures.gateway.append(asyncio.run(load(url, streams, seconds / turns, tokens, figures)))
            figures.memory.append(resident().rss * MB)
            figures.client.append(run_command(worker, streams, seconds / turns, tokens))
    return figures


def survive(streams: int, seconds: float, tokens: int) -> tuple[GatewayResults, dict[str, float]]:
    """Load a gateway while two servers are killed; returns the results and the gateway's own failover metrics."""
    figures = GatewayResults()
    with ExitStack() as stack:
        swarm, _, url = start(stack, SPANS * 2)

        async def loaded() -> float:
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(load(url, streams, seconds, tokens, figures))
                for victim in (swarm.servers[1], swarm.servers[3]):
                    await asyncio.sleep(seconds / 3)
                    victim.kill()
            return await loading

        figures.gateway.append(asyncio.run(loaded()))
        samples = text_string_to_metric_families(httpx.get(httpx.URL(url).join("/metrics")).text)
        counted = {sample.name: sample.value for family in samples for sample in family.samples}
    return figures, counted


def survived(figures: GatewayResults, counted: dict[str, float]) -> str:
    """Format the results in Markdown."""
    count, total = (counted[f"swarm_client_failover_seconds_{which}"] for which in ("count", "sum"))
    rows = [
        ("requests, failed ones", f"{figures.requests}, {len(figures.failed)}"),
        ("tokens/s together", f"{figures.gateway[0]:.1f}"),
        ("streams that lost a server", f"{count:.0f}"),
        ("pause of such a stream, s, mean", f"{total / count:.2f}" if count else "none"),
        ("tokens replayed", f"{counted['swarm_client_replayed_tokens_total']:.0f}"),
    ]
    return "\n".join(["| two servers killed | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def table(figures: GatewayResults, streams: int) -> str:
    """Format the results in Markdown."""
    ratios = [ours / theirs for ours, theirs in zip(figures.gateway, figures.client, strict=True)]
    pairs = zip(figures.first_gateway, figures.first_client, strict=True)
    rows = [
        (f"gateway, {streams} streams, tokens/s together", spread(figures.gateway, 1)),
        (f"Python client, {streams} threads, tokens/s together", spread(figures.client, 1)),
        ("gateway, relative to the Python client", spread(ratios)),
        ("requests, failed ones", f"{figures.requests}, {len(figures.failed)}"),
        ("gateway's memory after each repetition, MB", ", ".join(f"{one:.0f}" for one in figures.memory)),
        ("first token, gateway, ms", spread([one * 1e3 for one in figures.first_gateway], 1)),
        ("first token, Python client, ms", spread([one * 1e3 for one in figures.first_client], 1)),
        ("added by the gateway, ms, median of pairs", f"{statistics.median(a - b for a, b in pairs) * 1e3:.1f}"),
    ]
    return "\n".join(["| | median (range) |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=30)
    parser.add_argument("--kill", action="store_true", help="kill two servers meanwhile, and measure nothing else")
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    parser.add_argument("--worker", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return run_python_client(arguments.worker)
    quiet_hivemind()
    about = machine.describe()
    size = arguments.streams, arguments.seconds, arguments.tokens
    if arguments.kill:
        figures, counted = survive(*size)
        said = survived(figures, counted)
    else:
        figures = measure(*size, arguments.turns, arguments.first)
        said = table(figures, arguments.streams)
    print(", ".join(f"{name} {value}" for name, value in about.items()), said, sep="\n\n")
    for failure in figures.failed[:5]:
        print("failed:", failure)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "figures": asdict(figures)}, indent=2) + "\n")
    if figures.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
