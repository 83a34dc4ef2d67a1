"""The middleware, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.gateway.http import middleware
from swarm.gateway.http.middleware import RequestDraining

ASKED = [(b"transfer-encoding", b"chunked")]
REPLY = {"type": "http.response.body", "body": b"too large", "more_body": False}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def part(more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x", "more_body": more}


def exchange(coming: Sequence[dict[str, Any]], reads: int, headers: list[tuple[bytes, bytes]]) -> tuple[list[Any], int]:
    """What an application sends that reads this many parts of the request, and how many parts are left unread."""
    left, sent = list(coming), []

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(reads):
            await receive()
        await send(REPLY)

    asyncio.run(RequestDraining(app)({"type": "http", "headers": headers}, receive, send))
    return sent, len(left)


def test_a_response_to_a_complete_request_ends_at_once():
    assert exchange([part(True), part(False)], 2, ASKED) == ([REPLY], 0)


def test_a_request_without_a_body_is_not_waited_for():
    assert exchange([part(False)], 0, []) == ([REPLY], 1)
    assert exchange([part(False)], 0, [(b"content-length", b"0")]) == ([REPLY], 1)


@pytest.mark.parametrize("last", [part(False), {"type": "http.disconnect"}])
def test_the_rest_of_the_request_is_read_before_the_exchange_ends(last):
    sent, left = exchange([part(True)] * 5 + [last], 1, ASKED)
    assert sent == [{**REPLY, "more_body": True}, END]
    assert left == 0


@pytest.mark.parametrize(("linger", "pause"), [(60.0, 0.01), (0.01, 60.0)])
def test_draining_is_limited_in_time(monkeypatch, linger, pause):
    monkeypatch.setattr(middleware, "DRAIN_TIMEOUT_S", linger)
    monkeypatch.setattr(middleware, "DRAIN_PAUSE_TIMEOUT_S", pause)
    sent, _ = exchange([part(True)], 1, ASKED)
    assert sent == [{**REPLY, "more_body": True}, END]
