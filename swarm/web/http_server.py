"""Serves an ASGI application over HTTP until the process is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from swarm.errors import AddressUnavailable
from swarm.web.connection_timeouts import TimeoutHttpProtocol
from swarm.web.security_headers import SecurityHeaders

SHUTDOWN_GRACE_S = 3
"""How long unfinished responses may take at the end."""

KEEP_ALIVE_TIMEOUT_S = 30
"""How long a connection may be idle between requests."""

LISTEN_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port.

    Raises:
        AddressUnavailable: the address is taken or does not exist here.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        raise AddressUnavailable(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None


def url_of(listening: socket.socket) -> str:
    """The URL of a listening socket, as this machine reaches it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class SignalFreeServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone: uvicorn would raise them again at its end, before the swarm is left.

    `capture_signals` is an internal of uvicorn; see `connection_timeouts` about its pinned version.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_signal(
    app: ASGIApp, listening: socket.socket, max_connections: int, before_shutdown: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM, with `SECURITY_HEADERS` on every response.

    Args:
        max_connections: open at the same time; further ones get status 503.
        before_shutdown: called when the signal arrives, before unfinished responses get their last seconds.
    """
    config = uvicorn.Config(
        SecurityHeaders(app),
        http=TimeoutHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        backlog=LISTEN_BACKLOG,
    )
    server = SignalFreeServer(config)

    def shut_down() -> None:
        before_shutdown()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, shut_down)
    await server.serve(sockets=[listening])
