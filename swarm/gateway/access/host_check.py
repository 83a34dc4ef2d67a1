"""Checks the Host header of requests to a gateway without keys, against DNS rebinding.

A page of another site cannot read this gateway's responses. But the owner of the page's domain may point the name at
the gateway's address once the page is loaded; then the browser takes the gateway for the page's own origin. The page's
requests still carry the domain in `Host`. A name that no outsider can own is safe: an IP address, a name without a dot,
or one that does not exist in public DNS. The gateway's operator has to list all others. Loopback and local networks are
no exception, because the tricked browser is inside.

0.0.0.0 reaches this machine too, but browsers treat it as a stranger's address, and say less about who asks. It is no
address of anything, so it is refused.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.http.responses import error_response
from swarm.gateway.openai.api_errors import HostNotAllowed

logger = logging.getLogger(__name__)

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")
"""Top-level names that public DNS does not have."""

REFUSAL = (
    "this gateway does not accept requests under this name: use its IP address, or start it with --host-name and the "
    "name under which it is reached, or with --keys"
)


UNSPECIFIED_REFUSAL = "0.0.0.0 is not the address of any machine: use http://127.0.0.1, or this machine's own address"


def is_local_name(host: str) -> bool:
    """Whether `host`, the value of a `Host` header, is a name that no outsider can own."""
    name = name_of(host)
    if is_unspecified(host):
        return False
    return "." not in name or name.startswith("[") or name.endswith(PRIVATE_SUFFIXES) or is_address(name)


def name_of(host: str) -> str:
    """The name or address, without the port, in a `Host` header or in the part of a URL that becomes one."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[: name.find("]") + 1] or "."  # without the closing bracket it is no name
    return name.partition(":")[0].rstrip(".")


def is_address(host: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_unspecified(host: str) -> bool:
    """Whether `host`, the value of a `Host` header, is 0.0.0.0 or its like."""
    name = name_of(host).strip("[]")
    try:
        return name.isdigit() or ipaddress.ip_address(name).is_unspecified  # 0 is short for 0.0.0.0
    except ValueError:
        return False


def is_loopback(listening: socket.socket) -> bool:
    """Whether the socket is only reachable from this machine."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


class HostCheck:
    """Rejects requests whose Host header is neither one of this machine's own names nor one of `host_names`."""

    def __init__(self, app: ASGIApp, host_names: Collection[str] = ()) -> None:
        self._app = app
        self._host_names = {name_of(name) for name in host_names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if is_local_name(host) or name_of(host) in self._host_names:
            await self._app(scope, receive, send)
            return
        logger.info("Rejected a request for host %r", host[:100])
        refusal = UNSPECIFIED_REFUSAL if is_unspecified(host) else REFUSAL
        await error_response(HostNotAllowed(refusal, code="wrong_host"))(scope, receive, send)
