"""Time of a token on a slow network with push and without, relative to the unavoidable delays.

    python -m benchmarks.network.push [--servers 4] [--delay 0.05] [--tokens 20] [--repeats 3] [--json FILE]

A token needs at least N + 1 one-way delays with push, and 2 N without. The ratio to that includes all computing of
servers and client, and everything else. First the servers run in this process, on a network in memory. Then each is a
process of its own with real libp2p on loopback, whose streams are delayed. Both modes are measured alternately.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.common import machine
from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_servers
from benchmarks.common.tables import spread
from swarm import AutoDistributedModelForCausalLM, NetworkOptions
from swarm.client import connection
from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.common.version import VERSION
from swarm.data_structures import Hop, Route, ServerInfo, ServerState, Span, StepLayout, WireFormat
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.loading.span_loading import load_span
from swarm.protocol.compression import encode_tensor
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import Engine
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from swarm.transport.p2p import quiet_hivemind
from tests.memory_hub import MemoryHub, MemoryNetwork

SHAPE, PROMPT = "tiny", 16
HIDDEN = SHAPES[SHAPE].hidden_size
PUSH = (True, False)

Seconds = dict[bool, list[float]]
"""Whether push is on -> seconds of every token."""


class OneRoute:
    """A source of routes that knows only one. If a server fails, the benchmark fails."""

    missing_blocks_timeout = 0.0

    def __init__(self, route: Route) -> None:
        self._route = route

    async def route(
        self, span: Span, before: str | None, after: str | None, max_length: int, avoid: frozenset[str] = frozenset()
    ) -> Route:
        return self._route

    async def refresh(self) -> None:
        raise SystemExit("a server was lost")

    def report_failure(self, peer_id: str, error: Exception) -> None:
        raise SystemExit(f"{peer_id}: {error}")

    def report_success(self, peer_id: str) -> None: ...

    def timeout_factor(self, peer_id: str) -> float:
        return 1.0

    def may_push(self, before: str, after: str) -> bool:
        return True

    def alternative(self, current: Route, before: str | None, after: str | None, max_length: int) -> None: ...

    def note_step(self, hop: Hop, seconds: float, tokens: int) -> None: ...

    def distrust_link(self, before: str, after: str) -> None:
        raise SystemExit(f"{before} or {after} lied")

    def report_route(self, route: Route) -> None: ...


async def in_memory(path: Path, servers: int, delay: float, tokens: int, repeats: int) -> Seconds:
    """Measure servers in this process, each with its own compute thread, and a client's chain."""
    hub = MemoryHub(lambda source, target: delay)
    checkpoint = open_checkpoint(str(path))
    compute_threads, hops = [], []
    for name in split_blocks(checkpoint.blocks, servers):
        span = Span(*map(int, name.split(":")))
        model = load_span(checkpoint, span, dtype=torch.float32, device=torch.device("cpu"))
        compute_threads.append(ComputeThread())
        sessions = SessionTable(1 << 16, time.monotonic)
        network = MemoryNetwork(hub, name)
        await network.serve(MessageHandler(network, model, checkpoint.revision, sessions, Engine(compute_threads[-1])))
        hops.append(Hop(info_of(name, span, checkpoint.revision), span))

    async def run(push: bool) -> list[float]:
        options = RequestOptions(checkpoint.revision, WireFormat.NONE, 60.0, push)
        network, routes = MemoryNetwork(hub, f"client {push}"), OneRoute(Route(tuple(hops)))
        chain = Chain(SessionContext(network, routes, options, Span(0, checkpoint.blocks), PROMPT + tokens))
        await chain.open()
        times = []
        for start, count in [(0, PROMPT), *((PROMPT + token, 1) for token in range(tokens))]:
            hidden = encode_tensor(torch.randn(count, HIDDEN), WireFormat.NONE)
            began = time.perf_counter()
            await chain.step(
                PackedHidden(hidden, count, HIDDEN, WireFormat.NONE, "float32"), StepLayout((start,), (count,))
            )
            times.append(time.perf_counter() - began)
        await chain.close()
        return times[1:]

    found: Seconds = {push: [] for push in PUSH}
    for _, push in itertools.product(range(repeats), PUSH):
        found[push] += await run(push)
    for thread in compute_threads:
        thread.close()
    await hub.close()
    return found


def info_of(name: str, span: Span, revision: str) -> ServerInfo:
    return ServerInfo(
        peer_id=name,
        span=span,
        state=ServerState.ONLINE,
        throughput=1000.0,
        cache_tokens_free=1 << 16,
        revision=revision,
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version=VERSION,
    )


def over_libp2p(path: Path, servers: int, delay: float, tokens: int, repeats: int) -> Seconds:
    """Measure servers that are processes, and the whole client from embeddings to the final norm."""
    found: Seconds = {push: [] for push in PUSH}
    DelayedPeer.network = Network.read(str(delay))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    with slow_servers(path, split_blocks(SHAPES[SHAPE].num_hidden_layers, servers), delay) as address:
        models: dict[bool, Any] = {
            push: AutoDistributedModelForCausalLM.from_pretrained(
                path, initial_peers=[address], wire="none", network=NetworkOptions(push=push)
            )
            for push in PUSH
        }
        for _, push in itertools.product(range(repeats), PUSH):
            with models[push].inference_session(max_length=PROMPT + tokens) as session:
                session.step(torch.randn(1, PROMPT, HIDDEN))
                for _ in range(tokens):
                    began = time.perf_counter()
                    session.step(torch.randn(1, 1, HIDDEN))
                    found[push].append(time.perf_counter() - began)
                if len(session.route.hops) != servers:
                    raise SystemExit(f"the session took {session.route}")
        for model in models.values():
            model.swarm.close()
    return found


def table(found: dict[str, Seconds], servers: int, delay: float) -> str:
    """Format the results in Markdown."""
    lines = [
        f"{servers} servers, {1e3 * delay:.0f} ms one way between all; median (range) of the tokens",
        "",
        "| network | push | ideal ms per token | ms per token | ratio to ideal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for network, push in itertools.product(found, PUSH):
        seconds = found[network][push]
        ideal = delay * (servers + 1 if push else 2 * servers)
        ratios = spread([one / ideal for one in seconds], 3)
        times = spread([1e3 * one for one in seconds], 0)
        lines.append(f"| {network} | {'on' if push else 'off'} | {1e3 * ideal:.0f} | {times} | {ratios} |")
    for network, both in found.items():
        gain = statistics.median(both[False]) / statistics.median(both[True])
        lines += ["", f"{network}: push makes a token {gain:.2f} times as fast"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the raw results to this file")
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    about = machine.describe()
    how = (arguments.servers, arguments.delay, arguments.tokens, arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(SHAPE, Path(folder))
        found = {"memory": uvloop.run(in_memory(path, *how)), "libp2p": over_libp2p(path, *how)}
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(table(found, arguments.servers, arguments.delay))
    if arguments.json:
        figures = {network: {"push": times[True], "no push": times[False]} for network, times in found.items()}
        arguments.json.write_text(json.dumps({"machine": about, "seconds_a_token": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
