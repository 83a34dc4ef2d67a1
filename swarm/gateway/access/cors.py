"""Cross-origin requests (CORS): which other web sites' pages may use the gateway."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from swarm.gateway.openai.api_errors import OriginNotAllowed


def cors_middleware(origins: Sequence[str], request_headers: Sequence[str]) -> Middleware:
    """Answers preflight requests, and adds the CORS headers for these origins.

    Args:
        request_headers: that pages may set, beside `Authorization` and `Content-Type`.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", *request_headers],
        expose_headers=["Retry-After"],
    )


def check_origin(headers: Headers, origins: Sequence[str]) -> None:
    """Reject requests of other sites' pages, unless their origin is allowed.

    CORS headers alone do not prevent this: browsers send a preflight request only before requests that are not
    "simple". A simple request would be computed, and only its response hidden from the page.

    Raises:
        OriginNotAllowed: the browser says that the request is from another site, which is not among `origins`.
    """
    is_cross_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if is_cross_site and "*" not in origins and headers.get("origin") not in origins:
        raise OriginNotAllowed("pages of other sites may not use this gateway (see --cors)", code="wrong_origin")
