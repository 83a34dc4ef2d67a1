"""HTTP routes of the monitor: its page, and JSON for the page and for programs.

All paths are relative to the mount point of the routes:

- `api/v1/swarm`: the current state (`swarm.monitor.swarm_view.SwarmView`).
- `api/v1/history?model=NAME&hours=H`: points of the last hours.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from swarm.monitor.history import POINT_INTERVAL_S, RETENTION_S
from swarm.monitor.swarm_poller import SwarmPoller
from swarm.web.http_server import SECURITY_HEADERS, PageFiles

PAGE = Path(__file__).with_name("page")
FIRST_POLL_TIMEOUT_S = 15.0
"""Time that a request waits for the first poll."""

JSON = "application/json"
HEADERS = SECURITY_HEADERS
PAGE_HEADERS = {**SECURITY_HEADERS, "Cache-Control": "no-cache"}


def make_routes(poller: SwarmPoller) -> list[BaseRoute]:
    """Make the routes of one poller, to be served alone or mounted under a path. The caller starts the poller."""

    async def page(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    async def swarm(request: Request) -> Response:
        poller.request_update()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_POLL_TIMEOUT_S):
                await poller.was_read.wait()
        if poller.latest is None:
            return _error(503, "the swarm has not been read yet; try again in a few seconds")
        return Response(poller.latest_json, media_type=JSON, headers=HEADERS)

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
    ]


def _parse_hours(text: str | None) -> float | None:
    try:
        hours = float(text) if text is not None else 6.0
    except ValueError:
        return None
    return hours if 0 < hours <= RETENTION_S / 3600 else None


def _encode_history(poller: SwarmPoller, model: str | None, hours: float) -> bytes:
    """Encode the history as columns rather than points, which takes a quarter of the bytes."""
    end = poller.latest.time if poller.latest is not None else 0.0
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


def _error(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"error": {"message": message}}), status, HEADERS, JSON)
