"""Who may come in: whoever has a key where there are keys, and pages from elsewhere only where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.failures import WrongKey, WrongOrigin
from swarm.gateway.http import failed
from swarm.gateway.keys import Key
from swarm.gateway.service import Service


async def authorized(service: Service, headers: Headers) -> Key | None:
    """Who asks; None where there are no keys. Raises `WrongKey`."""
    keys = await service.keys()
    if keys is None:
        return None
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    key = keys.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        service.metrics.refused("unauthorized")
        said = "this gateway does not know the key" if secret else "say who you are: Authorization: Bearer KEY"
        raise WrongKey(f"{said}; whoever runs the gateway makes keys with `swarm keys add`", code="invalid_api_key")
    return key


def check_origin(headers: Headers, origins: Sequence[str]) -> None:
    """Raises `WrongOrigin` for what a page from elsewhere asks, unless the gateway is for that page.

    A browser asks leave only for what it calls not simple; anything else is computed before it hides the answer.
    """
    elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if elsewhere and "*" not in origins and headers.get("origin") not in origins:
        raise WrongOrigin("pages from elsewhere may not use this gateway (see --cors)", code="wrong_origin")


class NeedsKey:
    """Lets through to the addresses under `/api` who has a key, or everybody if the status is public.

    The page itself is open: it is the same for all, and asks for the key.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not self._service.settings.public_status and "/api/" in scope["path"]:
                await authorized(self._service, Headers(scope=scope))
        except WrongKey as failure:
            await failed(failure)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
