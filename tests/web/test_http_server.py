"""Connections of clients that are slow on purpose."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from swarm.web import http_server
from swarm.web.http_server import (
    SECURITY_HEADERS,
    SHARED_FOLDER,
    PageFiles,
    SecurityHeaders,
    SignalFreeServer,
    TimeoutHttpProtocol,
    listen,
)


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Whether or not its response is aborted meanwhile: closing alone would wait until everything is read."""
    monkeypatch.setattr(http_server, "UNREAD_TIMEOUT_S", 0.2)
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


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answers", "garbage"),
    [
        ("before", b"x\r\n"),
        ("when it has the body", b"5\r\nhello\r\n-1\r\n"),
        ("in parts", b"f" * 21 + b"\r\n"),
    ],
)
def test_a_body_that_is_no_http_is_answered_once_and_quietly(
    caplog: pytest.LogCaptureFixture, answers: str, garbage: bytes
) -> None:
    """uvicorn answered it twice, and wrote an error with its traceback to the log, for each such request."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            if answers != "when it has the body":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"a", "more_body": answers == "in parts"})
            begun.set()
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
            if answers == "when it has the body":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            if answers != "before":
                await send({"type": "http.response.body", "body": b"b"})
        finally:
            ended.set()

    async def work() -> bytes:
        with listen("127.0.0.1", 0) as listening:
            server = SignalFreeServer(uvicorn.Config(app, http=TimeoutHttpProtocol, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(HEAD)
            async with asyncio.timeout(30):
                await begun.wait()
                writer.write(garbage)
                answer = await reader.read()
                await ended.wait()
            writer.close()
            server.should_exit = True
            await serving
            return answer

    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(work())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 " if answers == "when it has the body" else b"HTTP/1.1 200 ")
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    folder = tmp_path / "page"
    (folder / "ui").mkdir(parents=True)
    (folder / "ui" / "dom.js").write_text("own")
    (tmp_path / "secret.py").write_text("secret")
    app = Starlette(routes=[Mount("/page", PageFiles(folder, {"Cache-Control": "no-cache"}))])
    return TestClient(SecurityHeaders(app))


def test_own_and_shared_files(client: TestClient) -> None:
    assert client.get("/page/ui/dom.js").text == "own"
    palette = client.get("/page/palette.css")
    assert palette.content == (SHARED_FOLDER / "palette.css").read_bytes()
    assert palette.headers["content-type"].startswith("text/css")


def test_nothing_else(client: TestClient) -> None:
    for path in ["../secret.py", "%2e%2e/secret.py", "ui/../../secret.py", "ui", "none.js", ""]:
        assert client.get(f"/page/{path}").status_code == 404


def test_headers(client: TestClient) -> None:
    for name in ("ui/dom.js", "palette.css"):
        headers = client.get(f"/page/{name}").headers
        assert headers["cache-control"] == "no-cache"
        assert {header: headers[header] for header in SECURITY_HEADERS} == {
            **SECURITY_HEADERS,
            "Cache-Control": "no-cache",
        }
