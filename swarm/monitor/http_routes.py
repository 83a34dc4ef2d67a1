"""The monitor over HTTP: its page, JSON for programs, and a stream of what changes.

All addresses are relative to where the routes are mounted:

- `api/v1/swarm`: the swarm now (`swarm.monitor.swarm_view.SwarmView`).
- `api/v1/history?model=NAME&hours=H`: points of the last hours.
- `api/v1/live`: Server-Sent Events, `event: swarm` with the same JSON after every look.
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

from swarm.monitor.history import BUCKET, KEPT
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.page_files import PageFiles
from swarm.web.security_headers import SECURITY_HEADERS

PAGE = Path(__file__).with_name("page")
MAX_LISTENERS = 100
FIRST_LOOK = 15.0
"""Seconds that a question waits for the first look."""

KEEP_ALIVE = 15.0
"""Seconds between signs of life on a stream, so that nobody between takes it for dead."""

JSON = "application/json"
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
PAGE_HEADERS = {**SECURITY_HEADERS, "Cache-Control": "no-cache"}


def make_routes(watch: SwarmPoller) -> list[BaseRoute]:
    """Routes of one watch, to be served alone or mounted under a path. The watch is started by whoever serves them."""

    async def page(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    async def swarm(request: Request) -> Response:
        watch.asked()
        try:
            async with asyncio.timeout(FIRST_LOOK):
                seen = await watch.after(0)
        except TimeoutError:
            seen = None
        if seen is None:
            return _error(503, "the swarm has not been looked at yet; ask again in some seconds")
        return Response(seen.data, media_type=JSON, headers=HEADERS)

    async def history(request: Request) -> Response:
        watch.asked()
        hours = _hours(request.query_params.get("hours"))
        if hours is None:
            return _error(400, f"hours is a number above 0, up to {KEPT / 3600:g}")
        return Response(_history(watch, request.query_params.get("model"), hours), media_type=JSON, headers=HEADERS)

    return [
        Route("/", page),
        Mount("/page", PageFiles(PAGE, PAGE_HEADERS)),
        Route("/api/v1/swarm", swarm),
        Route("/api/v1/history", history),
        Route("/api/v1/live", _LiveStream(watch), methods=["GET"]),
    ]


class _LiveStream:
    """The stream. A listener that is slow misses looks, and nothing is kept for it."""

    def __init__(self, watch: SwarmPoller) -> None:
        self._watch = watch
        self._listeners = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._listeners >= MAX_LISTENERS:
            refusal = _error(503, f"{MAX_LISTENERS} listeners are all that this monitor takes", {"Retry-After": "60"})
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
            self._watch.asked()
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    seen = await self._watch.after(number)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if seen is None:
                return
            number = seen.number
            yield b"event: swarm\ndata: " + seen.data + b"\n\n"


def _hours(text: str | None) -> float | None:
    try:
        hours = float(text) if text is not None else 6.0
    except ValueError:
        return None
    return hours if 0 < hours <= KEPT / 3600 else None


def _history(watch: SwarmPoller, model: str | None, hours: float) -> bytes:
    """Columns rather than points: a quarter of the bytes."""
    end = watch.latest.view.time if watch.latest is not None else 0.0
    tracks = watch.history.since(end - hours * 3600, model)
    models = {
        name: {
            "blocks": track.blocks,
            "time": [point.time for point in track.points],
            "servers": [point.servers for point in track.points],
            "throughput": [round(point.throughput, 3) for point in track.points],
            "covered": [point.covered for point in track.points],
        }
        for name, track in tracks.items()
    }
    return msgspec.json.encode({"version": 1, "end": end, "seconds_per_point": BUCKET, "models": models})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    content = msgspec.json.encode({"error": {"message": message}})
    return Response(content, status, HEADERS | (headers or {}), JSON)
