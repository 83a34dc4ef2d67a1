"""Time to read a swarm's announcements from the DHT, and to announce a server.

    python -m benchmarks.network.lookups

All peers run in this process, each with a libp2p daemon of its own, on loopback. The servers announce spans of one
model; a client reads all of them, as it does every half minute.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import uvloop

from benchmarks.common.report import Report, report_parser
from swarm.data_structures import ModelInfo, ServerInfo, ServerState, Span
from swarm.dht.announcer import Announcer
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.transport.p2p import P2PConfig, Peer

LONG_S = 200.0


def announcement(peer_id: str, span: Span) -> ServerInfo:
    """What a server of the span says about itself."""
    return ServerInfo(
        peer_id=peer_id,
        span=span,
        state=ServerState.ONLINE,
        throughput=100.0,
        cache_tokens_free=8192,
        revision="main",
        digests=("0123456789ab",) * span.length,
        compute_dtype="bfloat16",
        quantization="none",
        version="1",
        round_trips=tuple((peer_id, 0.01) for _ in range(16)),
    )


async def measure(report: Report, servers: int, blocks: int) -> None:
    """Milliseconds to announce, to read all announcements, and to read the list of models."""
    async with AsyncExitStack() as stack:

        async def join(*known: str, listen: bool = True) -> Peer:
            hosts = ("/ip4/127.0.0.1/tcp/0",) if listen else ()
            peer = await Peer.create(P2PConfig(known, hosts), AnnouncementValidator())
            stack.push_async_callback(peer.shutdown)
            return peer

        known = await (await join()).visible_addresses()
        model = ModelInfo("model", blocks, "main")
        announcers = []
        for number in range(servers):
            peer, start = await join(*known), number * blocks // servers
            info = announcement(peer.peer_id, Span(start, (number + 1) * blocks // servers))
            announcers.append(Announcer(peer, model, lambda info=info: info, LONG_S))  # type: ignore[misc]
        client = await join(*known, listen=False)
        for number in report.rounds(f"{servers} servers, {blocks} blocks"):
            report.add("announce, ms", await timed(announcers[number % servers].announce()), "less")
            if number < servers:  # not all have announced themselves
                await asyncio.gather(*(one.announce() for one in announcers))
            report.add("read, ms", await timed(fetch_servers(client.dht, "model", blocks)), "less")
            report.add("models, ms", await timed(fetch_models(client.dht)), "less")
        assert len(await fetch_servers(client.dht, "model", blocks)) == servers


async def timed(work: object) -> float:
    """Milliseconds that a coroutine takes."""
    began = time.perf_counter()
    await work  # type: ignore[misc]
    return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = report_parser(__doc__, repeats=30)
    parser.add_argument("--servers", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 80])
    arguments = parser.parse_args()
    with Report(arguments) as report:
        for servers in arguments.servers:
            for blocks in arguments.blocks:
                uvloop.run(measure(report, servers, blocks))


if __name__ == "__main__":
    main()
