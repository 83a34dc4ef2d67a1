"""Serves `/metrics` for Prometheus over HTTP, for programs without a web server of their own.

It runs in threads beside the program: at most `MAX_CONNECTIONS` at once, each for at most `CONNECTION_TIMEOUT_S`, so
that clients can neither slow the program down nor block the endpoint.
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
from swarm.metrics.registry import Registry, encode_metrics

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
CONNECTION_TIMEOUT_S = 10.0

TIMEOUT_CHECK_PERIOD_S = 0.2
"""Time between checks for connections that have been open for too long."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MetricsAddress:
    """The address to listen on.

    Attributes:
        host: an IP address of this machine.
        port: 0 for any free port.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> MetricsAddress:
        """Parse `PORT` (on loopback only), `HOST:PORT` or `[HOST]:PORT`. Raises `InvalidOption`."""
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
    """The HTTP endpoint. It serves from its construction until `close`.

    Args:
        registry: the metrics to serve.
        address: the address to listen on.

    Raises:
        AddressUnavailable: the address is in use, or does not belong to this machine.
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
            target=self._server.serve_forever, args=(TIMEOUT_CHECK_PERIOD_S,), name="swarm-metrics", daemon=True
        )
        self._thread.start()
        logger.info("Metrics: %s", self.url)

    @property
    def url(self) -> str:
        """The URL for Prometheus."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._server.shutdown()
        self._server.server_close()
        self._server.close_connections(older_than=0.0)
        self._thread.join()


class _MetricsServer(ThreadingTCPServer):
    """One thread per connection. Connections beyond the limit, or open for too long, are closed."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, registry: Registry, address: MetricsAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.registry = registry
        self._opened_at: dict[Any, float] = {}
        super().__init__((address.host, address.port), _MetricsRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._opened_at) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._opened_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.close_connections(older_than=CONNECTION_TIMEOUT_S)

    def close_connections(self, older_than: float) -> None:
        """Close the connections that have been open for so many seconds, which ends their threads."""
        now = time.monotonic()
        for request, opened_at in list(self._opened_at.items()):
            if now - opened_at >= older_than:
                with suppress(OSError):  # the client has closed it already
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics failed", exc_info=True)


class _MetricsRequestHandler(BaseHTTPRequestHandler):
    server: _MetricsServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            self._send(HTTPStatus.OK, *encode_metrics(self.server.registry))
        else:
            self._send(
                HTTPStatus.NOT_FOUND, b"Not found. This endpoint serves /metrics only.\n", "text/plain; charset=utf-8"
            )

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "swarm"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
