"""Cross-origin requests (CORS): which other web sites' pages may use the gateway."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from swarm.gateway.access.host_check import name_of
from swarm.gateway.http.middleware import REQUEST_ID_HEADER
from swarm.gateway.openai.api_errors import OriginNotAllowed


def cors_middleware(origins: Sequence[str]) -> Middleware:
    """Answers preflight requests, and adds the CORS headers for these origins.

    Pages may set any header: SDKs have many of their own, such as `x-stainless-os`, and none means anything here.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
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
