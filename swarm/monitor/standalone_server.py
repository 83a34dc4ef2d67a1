"""Runs the monitor as a web server of its own, until a signal ends it."""

from __future__ import annotations

import logging
import socket

from starlette.applications import Starlette

from swarm.monitor.http_routes import make_routes
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import serve_until_signal, url_of

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Maximum number of open connections."""


async def serve_monitor(poller: SwarmPoller, listening: socket.socket) -> None:
    """Run the poller and its pages until SIGINT or SIGTERM."""
    await poller.start()
    try:
        logger.info("Monitor: %s", url_of(listening))
        # End the streams first, or the server would wait for their clients.
        await serve_until_signal(Starlette(routes=make_routes(poller)), listening, MAX_CONNECTIONS, poller.end_streams)
    finally:
        await poller.stop()
