"""Who may use the gateway: names in the Host header, other sites' pages (CORS), and API keys.

The Host header is checked where no key is needed, against DNS rebinding. A page of another site cannot read this
gateway's responses. But the owner of the page's domain may point the name at the gateway's address once the page is
loaded; then the browser takes the gateway for the page's own origin. The page's requests still carry the domain in
`Host`. A name that no outsider can own is safe: an IP address, a name without a dot, or one that does not exist in
public DNS. The gateway's operator has to list all others. Loopback and local networks are no exception, because the
tricked browser is inside.

0.0.0.0 reaches this machine too, but browsers treat it as a foreign address and send fewer headers about the request's
source. No machine has that address, so it is refused.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.api_keys import ApiKey
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.middleware import REQUEST_ID_HEADER
from swarm.gateway.http.responses import error_response
from swarm.gateway.openai.api_errors import HostNotAllowed, InvalidApiKey, OriginNotAllowed

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


def cors_middleware(origins: Sequence[str]) -> Middleware:
    """Answers preflight requests, and adds the CORS headers for these origins.

    Pages may set any header: SDKs have many of their own, such as `x-stainless-os`, and none means anything here.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # Starlette then allows those that the preflight request names
        expose_headers=["Retry-After", REQUEST_ID_HEADER],
    )


def check_origin(headers: Headers, origins: Collection[str], host_names: Collection[str] = ()) -> None:
    """Reject requests of other sites' pages, unless their origin is allowed.

    CORS headers alone do not prevent this: browsers send a preflight request only before requests that are not
    "simple". A simple request would be computed, and only its response hidden from the page.

    Browsers say in `Sec-Fetch-Site` where a request comes from, but old ones do not, and none does where the gateway is
    reached over plain HTTP under another address than this machine's own. All of them say `Origin` in a POST. So both
    have to fit.

    Args:
        origins: of other sites whose pages may use the gateway; `*` for all.
        host_names: names of the gateway itself, if a proxy puts another one into `Host`.

    Raises:
        OriginNotAllowed: the browser says that the request is from another site, which is not among `origins`.
    """
    if _is_cross_site(headers, host_names) and "*" not in origins and headers.get("origin") not in origins:
        raise OriginNotAllowed(
            "pages of other sites may not use this gateway (see --cors; if this is the gateway's own page behind a "
            "proxy, let the proxy pass the Host header on, or name it with --host-name)",
            code="wrong_origin",
        )


def _is_cross_site(headers: Headers, host_names: Collection[str]) -> bool:
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return True
    if origin is None:
        return False  # not a browser, or a request that changes nothing
    place = origin.partition("://")[2]
    return place == "" or (
        _with_port(origin) != _with_port(f"{origin.partition('://')[0]}://{headers.get('host', '')}")
        and name_of(place) not in {name_of(name) for name in host_names}
    )


def _with_port(origin: str) -> tuple[str, str]:
    """Name and port of an origin; a browser leaves out the port that its scheme has anyway, a proxy may add it."""
    scheme, _, place = origin.lower().partition("://")
    name = name_of(place)
    port = place.rpartition("]")[2].partition(":")[2]
    return name, port or {"http": "80", "https": "443"}.get(scheme, "")


ANTHROPIC_KEY_HEADER = "x-api-key"
"""Where Anthropic's clients have their key."""


async def authenticate(gateway: GatewayState, headers: Headers) -> ApiKey | None:
    """The key of a request; None if the gateway has no keys.

    Raises:
        InvalidApiKey: the request has no key, or an unknown one.
    """
    keys = await gateway.keys()
    if keys is None:
        return None
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if not scheme:
        scheme, secret = "bearer", headers.get(ANTHROPIC_KEY_HEADER, "")
    key = keys.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        gateway.metrics.request_refused("unauthorized")
        problem = "this gateway does not know the key" if secret else "a key is required: Authorization: Bearer KEY"
        raise InvalidApiKey(
            f"{problem}; the operator of the gateway creates keys with `swarm keys add`", code="invalid_api_key"
        )
    return key


class RequireApiKey:
    """Rejects requests without a key to paths under `/api`, unless the status is public.

    The pages themselves are open: they are the same for everyone, and ask for the key.
    """

    def __init__(self, app: ASGIApp, gateway: GatewayState) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not self._gateway.settings.public_status and "/api/" in scope["path"]:
                await authenticate(self._gateway, Headers(scope=scope))
        except InvalidApiKey as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
