"""Middleware around every response: metrics and the access log, and delivery to clients that are still sending."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.metrics.gateway import GatewayMetrics

logger = logging.getLogger("swarm.gateway.access")

MAX_LOGGED_PATH_CHARACTERS = 200

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Names of requests that are taken over from clients."""

REQUEST_ID_BYTES = 12

DRAIN_TIMEOUT_S = 10.0
"""How long the rest of a request that is already answered is read."""

DRAIN_PAUSE_TIMEOUT_S = 2.0
"""How long nothing may arrive meanwhile."""


class RequestDraining:
    """Delivers responses that are sent before the request is complete, such as the rejection of a large body.

    The kernel resets a connection that is closed while the client is still sending, and a response that the client has
    not read yet is lost. So the response is sent first, then the rest of the request is read and discarded for a while,
    and only then the exchange ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        sending, held_open = True, False

        async def watched_receive() -> Message:
            nonlocal sending
            message = await receive()
            sending = sending and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_without_end(message: Message) -> None:
            nonlocal held_open
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            held_open = sending and is_end
            await send({**message, "more_body": True} if held_open else message)

        await self._app(scope, watched_receive, send_without_end)
        if held_open:
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    while sending:
                        async with asyncio.timeout(DRAIN_PAUSE_TIMEOUT_S):
                            await watched_receive()
            except TimeoutError:
                logger.debug("a client keeps sending although it was answered")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _request_id(scope: Scope) -> str:
    """The request's own name, if it has a usable one, or a new one."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(REQUEST_ID_BYTES)}"


class AccessLog:
    """Counts responses in the metrics, and writes one log line for each, with the name that the response carries."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.perf_counter()
        status, size_bytes = 500, 0
        request_id = _request_id(scope)

        async def watched_send(message: Message) -> None:
            nonlocal status, size_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            elif message["type"] == "http.response.body":
                size_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            seconds = time.perf_counter() - started_at
            model = scope.get("state", {}).get("model")
            self._metrics.request_answered(scope["path"], model, status, seconds)
            path = scope["path"][:MAX_LOGGED_PATH_CHARACTERS]
            logger.info(
                "%s %r %d %.3f s (%s)",  # %r because a path may contain line breaks
                scope["method"],
                path,
                status,
                seconds,
                request_id,
                extra={
                    "path": path,
                    "status": status,
                    "seconds": round(seconds, 3),
                    "bytes": size_bytes,
                    "request_id": request_id,
                },
            )
