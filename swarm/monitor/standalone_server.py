"""The monitor as a web server of its own, until a signal ends it."""

from __future__ import annotations

import logging
import socket

from starlette.applications import Starlette

from swarm.monitor.http_routes import make_routes
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import serve_until_signal, url_of

logger = logging.getLogger(__name__)

CONNECTIONS = 512
"""That may be open at once."""


async def serve(watch: SwarmPoller, listening: socket.socket) -> None:
    """Run the watch and its pages until SIGINT or SIGTERM."""
    await watch.start()
    try:
        logger.info("Monitor: %s", url_of(listening))
        # Listeners go first, or the server would wait for them.
        await serve_until_signal(Starlette(routes=make_routes(watch)), listening, CONNECTIONS, watch.hang_up)
    finally:
        await watch.stop()
