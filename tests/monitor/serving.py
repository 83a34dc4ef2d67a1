"""A monitor's web server in a thread of the test, over a swarm that the test describes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from swarm.monitor.http_routes import make_routes
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.monitor.swarm_view import NO_OPINIONS
from swarm.routing.suspicion import Opinion
from swarm.web.http_server import listen, url_of
from tests.monitor.sources import DescribedSwarm


@dataclass
class Monitor:
    """A running one. Set `swarm.found` and the next look sees it."""

    url: str
    swarm: DescribedSwarm
    poller: SwarmPoller


@contextmanager
def serve(
    swarm: DescribedSwarm,
    mounted: str = "",
    period: float = 0.1,
    now: Callable[[], float] | None = None,
    opinions: Mapping[str, Opinion] = NO_OPINIONS,
) -> Iterator[Monitor]:
    """Serve at `mounted` until the end of the block."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    running: list[tuple[SwarmPoller, uvicorn.Server]] = []

    async def work(listening) -> None:
        clock = {"now": now} if now is not None else {}
        poller = SwarmPoller(
            ("/ip4/127.0.0.1/tcp/1/p2p/QmPeer",), period=period, source=swarm, opinions=lambda: opinions, **clock
        )
        routes = make_routes(poller)
        app = Starlette(routes=[Mount(mounted, routes=routes)] if mounted else routes)
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=2))
        running.append((poller, server))
        await poller.start()
        ready.set()
        await server.serve(sockets=[listening])
        await poller.stop()

    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=lambda: loop.run_until_complete(work(listening)))
        thread.start()
        assert ready.wait(60)
        poller, server = running[0]

        def leave() -> None:
            server.should_exit = True

        try:
            yield Monitor(url_of(listening) + mounted.strip("/"), swarm, poller)
        finally:
            loop.call_soon_threadsafe(leave)
            thread.join(60)
            loop.close()
            assert not thread.is_alive()
