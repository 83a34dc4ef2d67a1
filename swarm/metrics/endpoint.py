"""`/metrics` for Prometheus over HTTP, for programs that have no web server of their own.

It runs in threads beside the program: at most `CONNECTIONS` at once, each for `DEADLINE` seconds at most, so that
whoever connects takes little from it and can hold nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from swarm.errors import AddressUnavailable, InvalidOption
from swarm.metrics.registry import Registry, exposition

logger = logging.getLogger(__name__)

CONNECTIONS = 8
DEADLINE = 10.0

LOOK = 0.2
"""Seconds between looks for connections that have been open for too long."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MetricsAddress:
    """Where to listen.

    Attributes:
        host: an IP address of this machine.
        port: 0 for any that is free.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> MetricsAddress:
        """Read `PORT`, which is on loopback only, `HOST:PORT` or `[HOST]:PORT`. Raises `InvalidOption`."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
        try:
            host = str(ipaddress.ip_address(LOOPBACK if host == "localhost" else host))
            if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
                raise ValueError(port)
        except ValueError:
            raise InvalidOption(
                f"--metrics {text!r}: use PORT (such as 9100, on this machine only) or an IP address and a port "
                "(such as 0.0.0.0:9100)"
            ) from None
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MetricsEndpoint:
    """Serves from when it is made until `close`.

    Args:
        address: where to listen.

    Attributes:
        registry: what is told.

    Raises:
        AddressUnavailable: the address is taken, or not one of this machine's.
    """

    def __init__(self, registry: Registry, address: MetricsAddress) -> None:
        self.registry = registry
        try:
            self._server = _MetricsServer(registry, address)
        except OSError as error:
            why = "another program is listening there" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressUnavailable(
                f"--metrics: cannot listen on {address}: {why}; choose another port, or 0 for any free one"
            ) from None
        self.address = MetricsAddress(address.host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK,), name="swarm-metrics", daemon=True
        )
        self._thread.start()
        logger.info("Metrics: %s", self.url)

    @property
    def url(self) -> str:
        """What to tell Prometheus."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Listen no more, and hang up."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up(older_than=0.0)
        self._thread.join()


class _MetricsServer(ThreadingTCPServer):
    """A thread a connection; those that are too many, or open for too long, are ended."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, registry: Registry, address: MetricsAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.registry = registry
        self._came: dict[Any, float] = {}
        super().__init__((address.host, address.port), _MetricsRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._came) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self._came[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._came.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.hang_up(older_than=DEADLINE)

    def hang_up(self, older_than: float) -> None:
        """End the connections that have been open for so many seconds; their threads see it and end."""
        now = time.monotonic()
        for request, came in list(self._came.items()):
            if now - came >= older_than:
                with suppress(OSError):  # its client was quicker
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics failed", exc_info=True)


class _MetricsRequestHandler(BaseHTTPRequestHandler):
    server: _MetricsServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            self._send(HTTPStatus.OK, *exposition(self.server.registry))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"Only /metrics is here.\n", "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "swarm"

    def log_message(self, format: str, *args: Any) -> None:
        """What strangers send is no news."""
