"""The monitor as a web server of its own, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from swarm.errors import AddressUnavailable
from swarm.monitor.watch import Watch
from swarm.monitor.web import make_routes

logger = logging.getLogger(__name__)

GRACE = 3
"""Seconds that answers which are under way get at the end."""

CONNECTIONS = 512


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `AddressUnavailable`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = error.strerror or str(error)
        raise AddressUnavailable(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None


async def serve(watch: Watch, listening: socket.socket) -> None:
    """Run the watch and its pages until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        Starlette(routes=make_routes(watch)),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Server(config)

    def leave() -> None:
        watch.hang_up()  # or the server would wait for the listeners
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    await watch.start()
    try:
        host, port = listening.getsockname()[:2]
        logger.info("Monitor: http://%s:%d/", f"[{host}]" if ":" in host else host, port)
        await server.serve(sockets=[listening])
    finally:
        await watch.stop()


class _Server(uvicorn.Server):
    """Leaves the signals to us: uvicorn raises them again at the end, before the swarm has been left."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
