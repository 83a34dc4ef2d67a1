"""Serves `/metrics` for Prometheus over HTTP, for programs without a web server of their own.

It is Prometheus' own application in threads beside the program, at most `MAX_CONNECTIONS` at once.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from swarm.errors import AddressUnavailable, InvalidOption
from swarm.metrics.registry import Registry

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
SILENCE_TIMEOUT_S = 10.0
"""How long a client may send nothing."""

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
        self._thread = threading.Thread(target=self._server.serve_forever, name="swarm-metrics", daemon=True)
        self._thread.start()
        logger.info("Metrics: %s", self.url)

    @property
    def url(self) -> str:
        """The URL for Prometheus."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """One thread per connection; connections beyond the limit are closed."""

    daemon_threads = True

    def __init__(self, registry: Registry, address: MetricsAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((address.host, address.port), _QuietRequestHandler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for metrics failed", exc_info=True)


class _QuietRequestHandler(WSGIRequestHandler):
    timeout = SILENCE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
