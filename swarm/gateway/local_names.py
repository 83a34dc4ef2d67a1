"""The names to which a gateway answers that only this machine reaches, and that no key protects.

A page from elsewhere cannot read what another origin answers. But whoever owns a domain may point its name at 127.0.0.1
once the page is there (DNS rebinding), and then this machine is the page's own origin. Its requests still carry the
name in `Host`, and nobody's domain is an address, a name without a dot, or one that public DNS does not know.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.failures import WrongHost
from swarm.gateway.http import failed

logger = logging.getLogger(__name__)

NOT_PUBLIC = (".localhost", ".local", ".internal")
"""Endings that public DNS does not have."""

REFUSAL = (
    "without keys this gateway answers to names of this machine only: ask for 127.0.0.1, or start it with --keys, "
    "or with --cors and the origin at which it is to be found"
)


def is_local_name(host: str) -> bool:
    """Whether nobody elsewhere can own this name, the value of a `Host` header."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.find("]") > 0
    name = name.partition(":")[0].rstrip(".")
    return "." not in name or name.endswith(NOT_PUBLIC) or is_address(name)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine reaches what listens there."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class LocalNames:
    """Answers only requests that call this machine by its own names.

    Args:
        origins: whose names are let through, too, such as a proxy's on this machine; `*` lets all pass.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self._app = app
        self._also = {urlsplit(origin).netloc or origin for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if is_local_name(host) or "*" in self._also or host.lower() in self._also:
            await self._app(scope, receive, send)
            return
        logger.info("refused a request for %r", host[:100])
        await failed(WrongHost(REFUSAL, code="wrong_host"))(scope, receive, send)
