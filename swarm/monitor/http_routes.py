"""HTTP routes of the monitor: its page, JSON for programs, and a stream of updates.

All paths are relative to the mount point of the routes:

- `api/v1/swarm`: the current state (`swarm.monitor.swarm_view.SwarmView`).
- `api/v1/history?model=NAME&hours=H`: points of the last hours.
- `api/v1/live`: Server-Sent Events, `event: swarm` with the same JSON after every poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from swarm.monitor.history import POINT_INTERVAL_S, RETENTION_S
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import SECURITY_HEADERS, PageFiles

PAGE = Path(__file__).with_name("page")
MAX_LISTENERS = 100
FIRST_POLL_TIMEOUT_S = 15.0
"""Time that a request waits for the first poll."""

KEEP_ALIVE_S = 15.0
"""Time between keep-alive comments on a stream, so that proxies do not close it."""

JSON = "application/json"
HEADERS = SECURITY_HEADERS
PAGE_HEADERS = {**SECURITY_HEADERS, "Cache-Control": "no-cache"}


def make_routes(poller: SwarmPoller) -> list[BaseRoute]:
    """Make the routes of one poller, to be served alone or mounted under a path. The caller starts the poller."""

    async def page(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    async def swarm(request: Request) -> Response:
        poller.request_update()
        try:
            async with asyncio.timeout(FIRST_POLL_TIMEOUT_S):
                seen = await poller.wait_for_newer(0)
        except TimeoutError:
            seen = None
        if seen is None:
            return _error(503, "the swarm has not been read yet; try again in a few seconds")
        return Response(seen.data, media_type=JSON, headers=HEADERS)

    async def history(request: Request) -> Response:
        poller.request_update()
        hours = _parse_hours(request.query_params.get("hours"))
        if hours is None:
            return _error(400, f"hours must be a number above 0 and at most {RETENTION_S / 3600:g}")
        return Response(
            _encode_history(poller, request.query_params.get("model"), hours), media_type=JSON, headers=HEADERS
        )

    return [
        Route("/", page),
        Mount("/page", PageFiles(PAGE, PAGE_HEADERS)),
        Route("/api/v1/swarm", swarm),
        Route("/api/v1/history", history),
        Route("/api/v1/live", _LiveStream(poller), methods=["GET"]),
    ]


class _LiveStream:
    """Streams updates to clients. A slow client misses updates; nothing is queued for it."""

    def __init__(self, poller: SwarmPoller) -> None:
        self._poller = poller
        self._listeners = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._listeners >= MAX_LISTENERS:
            message = f"the monitor already serves {MAX_LISTENERS} streams; try again later"
            refusal = _error(503, message, {"Retry-After": "60"})
            await refusal(scope, receive, send)
            return
        self._listeners += 1
        try:
            stream = StreamingResponse(self._events(), media_type="text/event-stream", headers=HEADERS)
            await stream(scope, receive, send)
        finally:
            self._listeners -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        number = 0
        while True:
            self._poller.request_update()
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    seen = await self._poller.wait_for_newer(number)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if seen is None:
                return
            number = seen.number
            yield b"event: swarm\ndata: " + seen.data + b"\n\n"


def _parse_hours(text: str | None) -> float | None:
    try:
        hours = float(text) if text is not None else 6.0
    except ValueError:
        return None
    return hours if 0 < hours <= RETENTION_S / 3600 else None


def _encode_history(poller: SwarmPoller, model: str | None, hours: float) -> bytes:
    """Encode the history as columns rather than points, which takes a quarter of the bytes."""
    end = poller.latest.view.time if poller.latest is not None else 0.0
    histories = poller.history.points_since(end - hours * 3600, model)
    models = {
        name: {
            "blocks": history.blocks,
            "time": [point.time for point in history.points],
            "servers": [point.servers for point in history.points],
            "throughput": [round(point.throughput, 3) for point in history.points],
            "covered": [point.covered for point in history.points],
        }
        for name, history in histories.items()
    }
    return msgspec.json.encode({"version": 1, "end": end, "seconds_per_point": POINT_INTERVAL_S, "models": models})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    content = msgspec.json.encode({"error": {"message": message}})
    return Response(content, status, {**HEADERS, **(headers or {})}, JSON)
