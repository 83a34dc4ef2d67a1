"""What happens to every reply: it is counted and logged, and tells browsers to be careful."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import MutableHeaders
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
