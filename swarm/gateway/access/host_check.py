"""Checks the Host header of a gateway without keys that listens on loopback, against DNS rebinding.

A page of another site cannot read responses of this machine. But the owner of a domain may point its name at 127.0.0.1
once the page is loaded, and then this machine counts as the page's own origin. Its requests still carry the domain in
`Host`. A name that nobody else can own is safe: an IP address, a name without a dot, or one that public DNS does not
have.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.http.responses import error_response
from swarm.gateway.openai.api_errors import HostNotAllowed

logger = logging.getLogger(__name__)

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
"""Top-level names that public DNS does not have."""

REFUSAL = (
    "without keys this gateway only accepts this machine's own names: use 127.0.0.1, or start it with --keys, "
    "or with --cors and the origin under which it is reached"
)


def is_local_name(host: str) -> bool:
    """Whether `host`, the value of a `Host` header, is a name that nobody else can own."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.find("]") > 0
    name = name.partition(":")[0].rstrip(".")
    return "." not in name or name.endswith(PRIVATE_SUFFIXES) or is_address(name)


def is_address(host: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(listening: socket.socket) -> bool:
    """Whether the socket is only reachable from this machine."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class HostCheck:
    """Rejects requests whose Host header is not one of this machine's own names.

    Args:
        origins: whose names are accepted, too, such as that of a reverse proxy on this machine; `*` accepts all.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self._app = app
        self._also_accepted = {urlsplit(origin).netloc or origin for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if is_local_name(host) or "*" in self._also_accepted or host.lower() in self._also_accepted:
            await self._app(scope, receive, send)
            return
        logger.info("Rejected a request for host %r", host[:100])
        await error_response(HostNotAllowed(REFUSAL, code="wrong_host"))(scope, receive, send)
