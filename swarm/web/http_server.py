"""The HTTP server of gateway and monitor, whose connections a slow client cannot keep open for long.

uvicorn limits how long a connection may be idle between requests, but neither how long the head of a request may take
nor how much the kernel buffers for a client that does not read.

`TimeoutHttpProtocol` relies on internals of uvicorn's h11 protocol: `cycle` with `response_complete`, `disconnected`
and `message_event`, `conn`, `loop`, `transport`, `send_400_response`, and asyncio callbacks that can be overridden.
They are not a public interface, so setup.cfg pins uvicorn to the minor version that the tests ran with. Read
`uvicorn/protocols/http/h11_impl.py` before the range is widened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, h11  # type: ignore[attr-defined]

from swarm.errors import AddressUnavailable

SECURITY_HEADERS = {
    # Pages load nothing from other sites, run no inline scripts, and cannot be embedded in frames.
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",  # the same for browsers that do not know frame-ancestors
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Pages of other sites load nothing from here; those that --cors allows ask in another mode.
    "Cross-Origin-Resource-Policy": "same-origin",
    # Answers belong to who asked for them. The files of the pages, which are the same for everyone, say otherwise.
    "Cache-Control": "no-store",
}


class SecurityHeaders:
    """Adds `SECURITY_HEADERS` to every response that does not set them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


REQUEST_HEAD_TIMEOUT_S = 10.0
"""Within which the head of a request has to arrive; that of the first one counts from the connection on."""

SEND_BUFFER_BYTES = 1 << 18
"""What the kernel buffers for a client that does not read. Its default is up to 4 MiB."""

UNREAD_TIMEOUT_S = 60.0
"""Within which a client has to read what is waiting for it. Without it, closing the connection would wait, too."""


class TimeoutHttpProtocol(H11Protocol):
    """Closes the connection if a client sends nothing, does not complete a request's head, or does not read."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: Any = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_responding:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. If it is the body of a request that is being answered, there is only one answer:
        uvicorn would send two, and write the error of the second one to the log for each such request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what is computed for it ends, as if the client had gone
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def _is_responding(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(REQUEST_HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._is_responding:
            self.transport.close()


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


SHARED_FOLDER = Path(__file__).with_name("page")
SHARED_FILES = frozenset({"palette.css"})


class PageFiles(StaticFiles):
    """Static files of one page and of `SHARED_FOLDER`.

    Args:
        folder: the page's files.
        headers: added to every response.
    """

    def __init__(self, folder: Path, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(directory=folder)
        self._headers = headers or {}

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path in SHARED_FILES:
            file = SHARED_FOLDER / path
            return str(file), file.stat()
        return super().lookup_path(path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response
