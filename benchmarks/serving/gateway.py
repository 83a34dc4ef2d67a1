"""Overhead of a gateway: 50 concurrent streams compared with the same load of the Python client, and the first token.

    python -m benchmarks.serving.gateway [--streams 50] [--seconds 15] [--tokens 64] [--first 10]
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
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.report import Report, report_parser
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


def body(tokens: int, stream: bool = True) -> dict[str, Any]:
    """The body of a request."""
    messages = [{"role": "user", "content": PROMPT}]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 1, "stream": stream, **options}


async def load(url: str, streams: int, seconds: float, tokens: int) -> float:
    """Run `streams` streams for `seconds`, each one request after the other; returns tokens per second.

    A request that fails ends the benchmark.
    """
    done = 0
    began = time.perf_counter()

    async def one() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            reply = await read(url, tokens)
            used = reply.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
            if not reply.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in reply or not used.isdigit():
                raise SystemExit(f"a request failed: {reply[-300:]!r}")
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


def measure(report: Report, streams: int, seconds: float, tokens: int, first: int) -> None:
    """Measure gateway and Python client alternately."""
    with ExitStack() as stack:
        swarm, gateway, url = start(stack, SPANS)
        worker = stack.enter_context(closing(Worker(["-m", "benchmarks.serving.gateway", "--worker", swarm.address])))
        client = stack.enter_context(httpx.Client(timeout=60))

        def first_token() -> float:
            began = time.perf_counter()
            client.post(url, json=body(1, stream=False)).raise_for_status()
            return time.perf_counter() - began

        for _ in range(3):
            first_token(), run_command(worker)
        asyncio.run(load(url, streams, min(5.0, seconds), tokens))  # what is made once is made here
        for _ in report.rounds(f"{streams} streams"):
            ours, theirs = (
                asyncio.run(load(url, streams, seconds, tokens)),
                run_command(worker, streams, seconds, tokens),
            )
            report.add("gateway, tokens/s together", ours, "more")
            report.add("Python client, tokens/s", theirs)
            report.add("of the Python client", ours / theirs, "more", decides=True)
            report.add("gateway's memory, MB", psutil.Process(gateway.pid).memory_info().rss * MB, "less")
            for _ in range(first):
                gateway_s, client_s = first_token(), run_command(worker)
                report.add("gateway, ms", 1e3 * gateway_s, "less", where="first token")
                report.add("Python client, ms", 1e3 * client_s, where="first token")
                report.add("added, ms", 1e3 * (gateway_s - client_s), "less", where="first token")


def survive(report: Report, streams: int, seconds: float, tokens: int) -> None:
    """Load a gateway while two servers are killed; adds the gateway's own failover metrics."""
    with ExitStack() as stack:
        swarm, _, url = start(stack, SPANS * 2)

        async def loaded() -> float:
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(load(url, streams, seconds, tokens))
                for victim in (swarm.servers[1], swarm.servers[3]):
                    await asyncio.sleep(seconds / 3)
                    victim.kill()
            return await loading

        rate = asyncio.run(loaded())
        samples = text_string_to_metric_families(httpx.get(httpx.URL(url).join("/metrics")).text)
        counted = {sample.name: sample.value for family in samples for sample in family.samples}
    count, total = (counted[f"swarm_client_failover_seconds_{which}"] for which in ("count", "sum"))
    where = f"{streams} streams, two servers killed, no request failed"
    report.add("tokens/s together", rate, "more", where=where)
    report.add("streams that lost a server", count, where=where)
    report.add("s of pause, mean", total / count if count else 0.0, "less", where=where)
    report.add("tokens replayed", counted["swarm_client_replayed_tokens_total"], where=where)


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15, help="of each side in each round (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--first", type=int, default=10, help="requests for a first token in each round (%(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill two servers meanwhile, and measure nothing else")
    parser.add_argument("--worker", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return run_python_client(arguments.worker)
    quiet_hivemind()
    size = arguments.streams, arguments.seconds, arguments.tokens
    with Report(arguments) as report:
        if arguments.kill:
            survive(report, *size)
        else:
            measure(report, *size, arguments.first)


if __name__ == "__main__":
    main()
