"""Serving an ASGI application over HTTP until the process is asked to leave."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from swarm.errors import AddressUnavailable
from swarm.web.http_protocol import BoundedHttp

GRACE = 3
"""Seconds that answers which are under way get at the end."""

KEEP_ALIVE = 30
"""Seconds that a connection may stay without a request."""

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any free one. Raises `AddressUnavailable`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        raise AddressUnavailable(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None


def address_of(listening: socket.socket) -> str:
    """The URL at which people on this machine find it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _Server(uvicorn.Server):
    """Leaves the signals to us: uvicorn raises them again at the end, before the swarm has been left."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_asked(
    app: ASGIApp, listening: socket.socket, connections: int, hang_up: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        connections: that may be open at once; others are answered with 503.
        hang_up: called as soon as the process is asked to leave, before what is under way gets its last seconds.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        backlog=BACKLOG,
    )
    server = _Server(config)

    def leave() -> None:
        hang_up()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    await server.serve(sockets=[listening])
