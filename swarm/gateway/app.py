"""The gateway's addresses."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.answering import Answering, Chunk
from swarm.gateway.failures import ApiFailure, NotFound, WrongKey, WrongMethod, WrongOrigin
from swarm.gateway.generation import Work
from swarm.gateway.http import DONE, EventStream, Json, begun, event, failed, guarded, read_body, unless_gone
from swarm.gateway.keys import Key
from swarm.gateway.limits import Refused, Ticket
from swarm.gateway.middleware import Measured, SafeHeaders
from swarm.gateway.prompts import chat_works, completion_works, echoed
from swarm.gateway.replies import ChatReplies, Replies, TextReplies
from swarm.gateway.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from swarm.gateway.service import ServedModel, Service
from swarm.metrics.registry import exposition
from swarm.monitor.web import PAGE as MONITOR_PAGE

PAGE = Path(__file__).with_name("page")
PALETTE = MONITOR_PAGE / "palette.css"
DETAILS = "x-swarm-details"
"""Header of those who want to hear of routes and recoveries."""


def make_app(
    service: Service, more: Sequence[BaseRoute] = (), lifespan: Callable[..., object] | None = None
) -> Starlette:
    """The ASGI application.

    Args:
        more: further addresses, such as the monitor's.
        lifespan: of what these need.
    """
    api = _Api(service)
    routes: list[BaseRoute] = [
        Route("/v1/models", guarded(api.models)),
        Route("/v1/models/{name:path}", guarded(api.model)),
        Route("/v1/chat/completions", guarded(api.chat), methods=["POST"]),
        Route("/v1/completions", guarded(api.completion), methods=["POST"]),
        Route("/healthz", guarded(api.healthy)),
        Route("/readyz", guarded(api.ready)),
        Route("/metrics", guarded(api.metrics)),
        *more,
        Route("/", _page),
        Mount("/page", _PageFiles(directory=PAGE)),
    ]
    middleware = [Middleware(Measured, metrics=service.metrics), Middleware(SafeHeaders)]
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
        lifespan=lifespan,  # type: ignore[arg-type]
    )


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


class _Api:
    """The addresses that need the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._default = service.settings.default_tokens

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

    async def chat(self, request: Request) -> Response:
        began = time.perf_counter()
        key = await authorized(self._service, request.headers)
        asked = read_chat(await self._body(request))
        served = self._service.model(asked.model)
        request.state.model = served.name

        works = await self._service.prepare(request.receive, key, partial(chat_works, asked, served, self._default))
        replies = ChatReplies(served.name, served.tokenizer)
        return await self._answer(request, key, asked, served, works, replies, began)

    async def completion(self, request: Request) -> Response:
        began = time.perf_counter()
        key = await authorized(self._service, request.headers)
        asked = read_completion(await self._body(request))
        served = self._service.model(asked.model)
        request.state.model = served.name

        works = await self._service.prepare(request.receive, key, partial(completion_works, asked, served))
        prompts = (
            await self._service.prepare(request.receive, key, partial(echoed, works, served)) if asked.echo else []
        )
        replies = TextReplies(served.name, served.tokenizer, prompts)
        return await self._answer(request, key, asked, served, works, replies, began)

    async def _answer(
        self,
        request: Request,
        key: Key | None,
        asked: ChatRequest | CompletionRequest,
        served: ServedModel,
        works: list[Work],
        replies: Replies,
        began: float,
    ) -> Response:
        reserved = sum(len(work.prompt) + work.max_tokens for work in works)
        answering = Answering(served, works, replies, asked.n or 1, began, self._service.metrics)
        tells = DETAILS in request.headers
        async with AsyncExitStack() as stack:
            ticket = await unless_gone(request.receive, self._let_in(stack, key, reserved))
            stack.callback(lambda: ticket.used(answering.usage["total_tokens"]))
            stack.enter_context(self._service.open(answering))
            await stack.enter_async_context(answering.running())
            if not asked.stream:
                body = await unless_gone(request.receive, answering.whole())
                return Json({**body, "swarm": answering.progress.details} if tells else body)
            events = _events(answering, asked.include_usage, tells)
            if not tells:
                # What fails before the first token gets its own status; who wants to hear of waiting hears at once.
                events = await unless_gone(request.receive, begun(events))
            stack.enter_context(self._service.metrics.stream())
            over = partial(self._over, stack.pop_all())
            return EventStream(events, self._service.settings.send_seconds, over)

    async def _let_in(self, stack: AsyncExitStack, key: Key | None, tokens: int) -> Ticket:
        """Wait for a place, which is free again when the stack is closed. Raises `Refused`."""
        try:
            return await stack.enter_async_context(self._service.admission.enter(key, tokens))
        except Refused as error:
            self._service.metrics.refused(error.scope)
            raise

    async def _body(self, request: Request) -> bytes:
        settings = self._service.settings
        check_origin(request.headers, settings.origins)
        body = await read_body(request, settings.request_bytes, settings.read_seconds)
        self._service.metrics.received(len(body))
        return body

    async def _over(self, stack: AsyncExitStack, was_read: bool) -> None:
        """A stream has come to its end."""
        if not was_read:
            self._service.metrics.disconnected()
        await stack.aclose()


async def _events(answering: Answering, include_usage: bool, tells: bool) -> AsyncGenerator[bytes]:
    """The encoded events of a stream."""
    async with aclosing(answering.stream(include_usage)) as parts:
        async for part in parts:
            if isinstance(part, Chunk):
                yield event(part.body)
            elif tells:
                yield event(part.body, "swarm")
    yield DONE


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
