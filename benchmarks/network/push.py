"""Time of a token on a slow network with push and without, relative to the unavoidable delays.

    python -m benchmarks.network.push [--servers 4] [--delay 0.05] [--tokens 20]

A token needs at least N + 1 one-way delays with push, and 2 N without. The ratio to that includes all computing of
servers and client, and everything else. First the servers run in this process, on a network in memory. Then each is a
process of its own with real libp2p on loopback, whose streams are delayed. Both modes are measured alternately.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.common.delayed import DelayedPeer, Network
from benchmarks.common.report import Report, report_parser
from benchmarks.common.shapes import SHAPES, make_model, split_blocks
from benchmarks.common.slow_network import slow_servers
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


def add(report: Report, servers: int, delay: float, pushed: float, plain: float) -> None:
    """A round: seconds of a token with push and without."""
    ideal = delay * (servers + 1)
    report.add("ms with push", 1e3 * pushed, "less")
    report.add("ms without", 1e3 * plain)
    report.add("with push, times the delays", pushed / ideal, "less", decides=True)
    report.add("push makes it faster by", plain / pushed, "more", decides=True)


async def in_memory(report: Report, path: Path, servers: int, delay: float, tokens: int) -> None:
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

    async def run(push: bool) -> float:
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
        return statistics.median(times[1:])

    for _ in report.rounds(where("memory", servers, delay)):
        add(report, servers, delay, await run(True), await run(False))
    for thread in compute_threads:
        thread.close()
    await hub.close()


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


def over_libp2p(report: Report, path: Path, servers: int, delay: float, tokens: int) -> None:
    """Measure servers that are processes, and the whole client from embeddings to the final norm."""
    DelayedPeer.network = Network.read(str(delay))
    connection.Peer = DelayedPeer  # type: ignore[attr-defined, misc]
    with slow_servers(path, split_blocks(SHAPES[SHAPE].num_hidden_layers, servers), delay) as address:
        models: dict[bool, Any] = {
            push: AutoDistributedModelForCausalLM.from_pretrained(
                path, initial_peers=[address], wire="none", network=NetworkOptions(push=push)
            )
            for push in (True, False)
        }

        def run(push: bool) -> float:
            times = []
            with models[push].inference_session(max_length=PROMPT + tokens) as session:
                session.step(torch.randn(1, PROMPT, HIDDEN))
                for _ in range(tokens):
                    began = time.perf_counter()
                    session.step(torch.randn(1, 1, HIDDEN))
                    times.append(time.perf_counter() - began)
                if len(session.route.hops) != servers:
                    raise SystemExit(f"the session took {session.route}")
            return statistics.median(times)

        for _ in report.rounds(where("libp2p", servers, delay)):
            add(report, servers, delay, run(True), run(False))
        for model in models.values():
            model.swarm.close()


def where(network: str, servers: int, delay: float) -> str:
    return f"{network}, {servers} servers, {1e3 * delay:.0f} ms one way between all"


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--tokens", type=int, default=20)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    how = arguments.servers, arguments.delay, arguments.tokens
    with tempfile.TemporaryDirectory() as folder, Report(arguments) as report:
        path = make_model(SHAPE, Path(folder))
        uvloop.run(in_memory(report, path, *how))
        over_libp2p(report, path, *how)


if __name__ == "__main__":
    main()
