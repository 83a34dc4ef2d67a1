"""What happens to every reply: it is counted and logged, tells browsers to be careful, and reaches who still sends."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.metrics.gateway import GatewayMetrics

logger = logging.getLogger("swarm.gateway.access")

HEADERS = {
    # Pages load nothing from elsewhere, run nothing that is written into them, and stand in nobody's frame.
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


LONGEST_PATH = 200
"""Characters of a path that are logged."""


class SafeHeaders:
    """Adds `HEADERS` to every reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


LINGER, PAUSE = 10.0, 2.0
"""Seconds for which the rest of a refused request is taken, altogether and while nothing comes."""


class Lingering:
    """Lets a reply arrive that came before its request was complete, such as a refusal of what is too large.

    A connection that is closed while the client still sends is reset by the kernel, and a reply that the client has not
    read yet is lost with it. So the reply is sent, what still comes is thrown away for a while, and only then the
    exchange ends.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        comes, held = True, False

        async def counted() -> Message:
            nonlocal comes
            message = await receive()
            comes = comes and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def held_open(message: Message) -> None:
            nonlocal held
            held = comes and message["type"] == "http.response.body" and not message.get("more_body", False)
            await send({**message, "more_body": True} if held else message)

        await self._app(scope, counted, held_open)
        if held:
            try:
                async with asyncio.timeout(LINGER):
                    while comes:
                        async with asyncio.timeout(PAUSE):
                            await counted()
            except TimeoutError:
                logger.debug("a client sends on though it was answered")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class Measured:
    """Counts replies and writes one log line each."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, size = 500, 0

        async def watched(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - began
            model = scope.get("state", {}).get("model")
            self._metrics.answered(scope["path"], model, status, seconds)
            self._metrics.sent(size)
            path = scope["path"][:LONGEST_PATH]
            logger.info(
                "%s %r %d %.3f s",  # a path may hold line breaks
                scope["method"],
                path,
                status,
                seconds,
                extra={"path": path, "status": status, "seconds": round(seconds, 3), "bytes": size},
            )
