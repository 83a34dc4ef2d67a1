"""Connections of clients that are slow on purpose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from swarm.web import connection_timeouts
from swarm.web.connection_timeouts import TimeoutHttpProtocol
from swarm.web.http_server import SignalFreeServer, listen


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Whether or not its response is aborted meanwhile: closing alone would wait until everything is read."""
    monkeypatch.setattr(connection_timeouts, "UNREAD_TIMEOUT_S", 0.2)
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        count = 0
        while not left.is_set() and not (ends and count > 64):
            count += 1
            sending = asyncio.ensure_future(
                send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            )
            await asyncio.wait({sending}, timeout=0.05 if ends else None)

    class Watched(TimeoutHttpProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            left.set()

    async def work() -> None:
        with listen("127.0.0.1", 0) as listening:
            server = SignalFreeServer(uvicorn.Config(app, http=Watched, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            _, writer = await asyncio.open_connection(*listening.getsockname(), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(10):
                await left.wait()
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(work())
