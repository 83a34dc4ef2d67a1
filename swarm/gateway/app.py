"""The gateway's addresses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from swarm.gateway.endpoints import DETAILS, Generating
from swarm.gateway.entrance import authorized
from swarm.gateway.failures import ApiFailure, NotFound, WrongMethod
from swarm.gateway.http import Json, failed, guarded
from swarm.gateway.local_names import LocalNames
from swarm.gateway.middleware import Lingering, Measured, SafeHeaders
from swarm.gateway.service import Service
from swarm.metrics.registry import exposition
from swarm.monitor.http_routes import PAGE as MONITOR_PAGE

PAGE = Path(__file__).with_name("page")
PALETTE = MONITOR_PAGE / "palette.css"


def make_app(service: Service, more: Sequence[BaseRoute] = (), only_local: bool = False) -> Starlette:
    """The ASGI application.

    Args:
        more: further addresses, such as the monitor's.
        only_local: answer to this machine's own names, and to those of the settings' origins.
    """
    api, generating = _Api(service), Generating(service)
    routes: list[BaseRoute] = [
        Route("/v1/models", guarded(api.models)),
        Route("/v1/models/{name:path}", guarded(api.model)),
        Route("/v1/chat/completions", guarded(generating.chat), methods=["POST"]),
        Route("/v1/completions", guarded(generating.completion), methods=["POST"]),
        Route("/healthz", guarded(api.healthy)),
        Route("/readyz", guarded(api.ready)),
        Route("/metrics", guarded(api.metrics)),
        *more,
        Route("/", _page),
        Mount("/page", _PageFiles(directory=PAGE)),
    ]
    middleware = [Middleware(Lingering), Middleware(Measured, metrics=service.metrics), Middleware(SafeHeaders)]
    if only_local:
        middleware.append(Middleware(LocalNames, origins=service.settings.origins))
    if service.settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.settings.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", DETAILS],
                expose_headers=["Retry-After"],
            )
        )
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _no_such},
    )


class _Api:
    """The addresses that need the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        await authorized(self._service, request.headers)
        return Json({"object": "list", "data": [model.described() for model in self._service.models.values()]})

    async def model(self, request: Request) -> Response:
        await authorized(self._service, request.headers)
        return Json(self._service.model(request.path_params["name"]).described())

    async def healthy(self, request: Request) -> Response:
        """The process works."""
        return Json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The swarm can answer, too."""
        await self._service.check_ready()
        return Json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        if not self._service.settings.public_status:
            await authorized(self._service, request.headers)
        body, kind = exposition(self._service.registry)
        return Response(body, media_type=kind)


class _PageFiles(StaticFiles):
    """The chat page's files, and the palette that it shares with the monitor."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path == PALETTE.name:
            return str(PALETTE), PALETTE.stat()
        return super().lookup_path(path)


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure: ApiFailure
    path = request.url.path[:100]
    if error.status_code == 405:
        failure = WrongMethod(f"{path} does not take {request.method}", code="method_not_allowed")
    else:
        failure = NotFound(f"there is nothing at {path}", code="not_found")
    reply = failed(failure)
    reply.headers.update(error.headers or {})
    return reply
